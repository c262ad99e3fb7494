import pytest

from forgather.errors import ProjectError, Severity
from forgather.project.dynamic_args import read_options
from forgather.project.project import Project
from tests.project.workbench import make_project


def options(folder, text, reserved=frozenset({"--set", "-o"})):
    make_project(folder, {"templates/configs/a.yaml": text})
    options, faults = read_options(Project("a", str(folder)).declared_graph, reserved=reserved)
    if faults:
        first, *rest = [fault.error for fault in faults]
        first.others = tuple(fault.diagnostic for fault in rest)
        raise first
    return options


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
            "the default 'many' of option '--a' is not of type int",
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


def test_all_options_that_cannot_be_are_reported_together(tmp_path):
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


@pytest.mark.parametrize(
    ("fields", "action", "of_type"),
    [
        ("type: flag", "store_true", bool),
        ("action: store_true", "store_true", bool),
        ("type: bool, action: store_true", "store_true", bool),
        ("type: flag, action: store_false, default: true", "store_false", bool),
        ("action: append, default: [a]", "append", str),
        ("type: int, action: append, choices: [1, 2], default: [1, 2]", "append", int),
        ("type: int, action: append, default: 1", "append", int),
        ("type: bool", "store", bool),
        ("action: store", "store", str),
    ],
)
def test_an_action_says_what_the_option_does(tmp_path, fields, action, of_type):
    (option,) = options(tmp_path, f"dynamic_args: [{{names: --a, {fields}}}]\n")

    assert (action, of_type) == (option.action, option.type)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("action: store_ture", "unknown action 'store_ture'"),
        ("action: count", "unknown action 'count'"),
        ("action: [append]", "unknown action"),
        ("action: store_true, type: int", "takes no value"),
        ("action: append, type: flag", "which takes a value"),
        ("action: append, type: bool", "which takes a value"),
        ("type: flag, choices: [1]", "takes no value, and has 'choices'"),
        ("type: flag, default: maybe", "the default 'maybe' of option '--a' is not a boolean"),
        ("type: int, action: append, default: [1, x]", "the default 'x' of option '--a' is not of type int"),
    ],
)
def test_an_action_that_cannot_be_is_an_error_with_its_place(tmp_path, fields, message):
    with pytest.raises(ProjectError, match=message) as caught:
        options(tmp_path, f"dynamic_args: [{{names: --a, {fields}}}]\n")

    assert ("FG408", 1) == (caught.value.code, caught.value.span.line)


def test_a_wrong_declaration_takes_away_its_own_option_only(tmp_path):
    text = "dynamic_args:\n  - {names: --a, type: int}\n  - {names: [--b, -c], typ: int}\n  - {names: --d}\nmain: 1\n"
    folder = make_project(tmp_path, {"templates/configs/a.yaml": text})
    project = Project("a", folder)
    declared = read_options(project.declared_graph)

    assert ["a", "d"] == [option.variable for option in declared.options]
    assert [("--b", "-c")] == [fault.names for fault in declared.faults]
    assert 1 == project()
    assert [("FG408", Severity.WARNING)] == [
        (one.code, one.severity) for one in project.diagnostics if one.severity is not Severity.LINT
    ]
    for words, unknown, is_hit in ((["-c", "1"], False, True), (["--b=1"], False, True), (["--a", "1"], False, False)):
        assert is_hit is (declared.fault_of(words, unknown=unknown) is not None)
    assert declared.fault_of(["--bb"], unknown=True) is not None
