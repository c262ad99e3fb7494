import pytest

from forgather.errors import ProjectError, Severity
from forgather.project.declared import declared_options
from forgather.project.project import Project
from tests.project.workbench import make_project


def options(folder, text, reserved=frozenset({"--set", "-o"})):
    make_project(folder, {"templates/configs/a.yaml": text})
    return declared_options(Project("a", str(folder)).declared_graph, reserved=reserved)


def test_a_config_without_declarations_has_no_options(tmp_path):
    assert [] == options(tmp_path, "main: 1\n")


@pytest.mark.parametrize(
    "text",
    [
        "dynamic_args:\n  - {names: [--max-steps, -n], type: int, default: 3, choices: [1, 3], help: h}\n",
        "dynamic_args:\n  steps: {names: [--max-steps, -n], type: int, default: 3, choices: [1, 3], help: h}\n",
        "dynamic_args: !dlist\n  gone: ~\n  s: {names: [--max-steps, -n], type: int, default: 3, choices: [1, 3], help: h}\n",
    ],
)
def test_a_list_a_mapping_and_a_dlist_declare_the_same(tmp_path, text):
    (option,) = options(tmp_path, text)

    assert (("--max-steps", "-n"), "max_steps", int, (1, 3), 3, "h") == (
        option.names,
        option.variable,
        option.type,
        option.choices,
        option.default,
        option.help,
    )


def test_the_key_of_a_mapping_is_the_name_where_none_is_given(tmp_path):
    (option,) = options(tmp_path, "dynamic_args:\n  max_steps: {type: int}\n")

    assert (("--max-steps",), "max_steps") == (option.names, option.variable)


@pytest.mark.parametrize(
    ("text", "message", "code"),
    [
        ("dynamic_args: 3\n", "neither a list nor a mapping", "FG408"),
        ("dynamic_args: [3]\n", "is not a mapping", "FG408"),
        ("dynamic_args: [{names: --a, typ: int}]\n", "has no field 'typ'", "FG408"),
        ("dynamic_args: [{type: int}]\n", "has no 'names'", "FG408"),
        ("dynamic_args: [{names: []}]\n", "has no 'names'", "FG408"),
        ("dynamic_args: [{names: '--a b'}]\n", "cannot be the name of an option", "FG408"),
        ("dynamic_args: [{names: -long}]\n", "cannot be the name of an option", "FG408"),
        (
            "dynamic_args: [{names: --a, type: int, default: many}]\n",
            "the default 'many' of option '--a' is no int",
            "FG408",
        ),
        ("dynamic_args: [{names: --a, type: complex}]\n", "unknown type 'complex'", "FG408"),
        ("dynamic_args: [{names: --a, choices: 3}]\n", "'choices' of option '--a' is not a list", "FG408"),
        ("dynamic_args: [{names: --a, default: !call:os:getcwd }]\n", "may hold plain data only", "FG408"),
        ("dynamic_args: [{names: --set}]\n", "'--set' of this config is taken by the command line", "FG409"),
        ("dynamic_args: [{names: [--out, -o]}]\n", "'-o' of this config is taken by the command line", "FG409"),
        ("dynamic_args: [{names: --a}, {names: --a}]\n", "taken by another option", "FG409"),
        ("dynamic_args: [{names: --a-b}, {names: --a_b}]\n", "taken by another option", "FG409"),
        ("dynamic_args: [{names: --a, type: bool}, {names: --no-a}]\n", "taken by another option", "FG409"),
        ("dynamic_args: [{names: --hostname}]\n", "would replace the standard variable 'hostname'", "FG409"),
    ],
)
def test_a_declaration_that_cannot_be_is_an_error_with_its_place(tmp_path, text, message, code):
    with pytest.raises(ProjectError, match=message) as caught:
        options(tmp_path, text)

    assert (code, str(tmp_path / "templates/configs/a.yaml")) == (caught.value.code, caught.value.span.file)


def test_all_options_that_cannot_be_are_told_together(tmp_path):
    with pytest.raises(ProjectError) as caught:
        options(
            tmp_path,
            "dynamic_args:\n  - {names: --a, type: flot}\n  - {names: --b, chioces: [1]}\n  - {names: --set}\n",
        )
    found = [caught.value.diagnostic, *caught.value.others]
    assert [("FG408", 2), ("FG408", 3), ("FG409", 4)] == [(one.code, one.span.line) for one in found]


def test_an_option_that_no_template_reads_is_a_finding_where_it_is_declared(tmp_path):
    text = (
        "dynamic_args:\n  depth:\n    names: --depht\n    type: int\n  width: {type: int}\n"
        "main: [{{ depth | default(4) }}, {{ width is defined }}]\n"
    )
    folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": text})
    (found,) = Project("a", folder).diagnostics
    assert ("FG246", Severity.LINT, 2) == (found.code, found.severity, found.span.line)
    assert "the option '--depht' has no effect: no template of this config reads 'depht'" == found.message
    assert "did you mean 'depth'?" == found.hint


def test_an_option_of_a_shared_template_that_nothing_reads_is_a_lint(tmp_path):
    text = "dynamic_args:\n-- include 'options/trainer.yaml'\nmain: {{ [max_steps, seed, output_dir] is defined }}\n"
    folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": text})
    (found,) = Project("a", folder).diagnostics
    assert ("FG246", Severity.LINT) == (found.code, found.severity)
    assert found.hint.startswith("read it, as in {{ resume_from_checkpoint | default(...) }}")
