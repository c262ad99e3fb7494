import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.load import load
from forgather.config.render import render
from forgather.errors import LoadError, Severity

BASE = "a: 1\n-- block model\n-- endblock\n-- block lr_scheduler\n-- endblock\n-- include 'shared' ignore missing\n"


@pytest.fixture
def findings(tmp_path):
    def run(**files):
        files.setdefault("base", BASE)
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        rendered = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")
        return [(item.code, item.severity, item.span.line, item.hint) for item in rendered.diagnostics]

    return run


def test_a_config_without_mistakes_has_no_findings(findings):
    assert [] == findings(
        main="-- extends 'base'\n-- set x = 1\n# a comment\n\n[model]\nb: {{ x }}\n[lr_scheduler]\nc: 1\n"
    )


def test_a_misspelt_block_is_an_error_with_the_name(findings):
    assert [("FG130", Severity.ERROR, 3, "did you mean 'lr_scheduler'?")] == findings(
        main="-- extends 'base'\n\n[lr_schedulr]\nb: 1\n"
    )


def test_a_block_of_another_name_is_a_warning_with_the_blocks_there_are(findings):
    assert [("FG130", Severity.WARNING, 2, "blocks of the parents: lr_scheduler, model")] == findings(
        main="-- extends 'base'\n[notes]\nb: 1\n"
    )


def test_a_near_name_that_the_template_uses_itself_is_no_misspelling(findings):
    found = findings(main="-- extends 'base'\n[model]\nb: 1\n[models]\nc: 1\n")
    assert [("FG130", Severity.WARNING, 4)] == [item[:3] for item in found]


def test_blocks_inside_other_blocks_and_blocks_of_grandparents_have_an_effect(findings):
    assert [] == findings(
        main="-- extends 'middle'\n[lr_scheduler]\nx: 1\n[inner]\ny: 1\n",
        middle="-- extends 'base'\n[model]\n  [inner]\n  z: 1\n",
    )


def test_a_block_called_by_name_has_an_effect(findings):
    assert [] == findings(main="-- extends 'base'\n-- block helper\nx: 1\n-- endblock\n[model]\n{{ self.helper() }}\n")


def test_blocks_of_a_template_that_extends_nothing_have_an_effect(findings):
    assert [] == findings(main="-- if false\n-- extends 'base'\n-- endif\n[anything]\nx: 1\n")


def test_text_outside_of_any_block_is_a_warning(findings):
    assert [("FG131", Severity.WARNING, 3, "move it into a block, or remove it")] == findings(
        main="-- extends 'base'\n# fine\nlost: 1\nlost: 2\n"
    )
    assert [("FG131", 2)] == [(item[0], item[2]) for item in findings(main="-- extends 'base'\n{{ 1 }}\n")]


def test_text_after_a_dynamic_extends_is_judged_by_what_happened(findings):
    assert ["FG131"] == [item[0] for item in findings(main="-- if true\n-- extends 'base'\n-- endif\nlost: 1\n")]
    assert [] == findings(main="-- if false\n-- extends 'base'\n-- endif\nkept: 1\n")


def test_an_unused_sub_template_is_a_warning_at_its_header(findings):
    assert [("FG132", Severity.WARNING, 2, "did you mean 'shared'?")] == findings(
        main="-- extends 'base'\n#--- shered ---\nx: 1\n"
    )


def test_a_sub_template_that_the_parent_includes_is_used(findings):
    assert [] == findings(main="-- extends 'base'\n#--- shared ---\nx: 1\n")


def test_the_parents_own_definition_of_a_used_name_is_no_finding(findings):
    assert [] == findings(main="-- extends 'base'\n#--- shared ---\nx: 1\n", base=BASE + "#--- shared ---\ny: 1\n")


def test_a_sub_template_that_hides_a_file_is_a_lint(findings):
    found = findings(main="-- extends 'base'\n#--- shared ---\nx: 1\n", shared="y: 1\n")
    assert [("FG133", Severity.LINT, 2)] == [item[:3] for item in found]


def test_a_sub_template_extends_the_next_definition_outward(tmp_path):
    files = {
        "main": "-- extends 'base'\n#--- shared ---\n-- extends 'shared'\n[k]\nmain: 1\n== super()\n",
        "base": BASE + "#--- shared ---\n-- extends 'shared'\n[k]\nbase: 1\n== super()\n",
        "shared": "[k]\nfile: 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    rendered = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")
    assert ["a: 1", "main: 1", "base: 1", "file: 1"] == rendered.text.split()[:0] + [
        line for line in rendered.text.split("\n") if line
    ]


def test_two_loads_never_see_each_others_sub_templates(tmp_path):
    (tmp_path / "base").write_text(BASE)
    (tmp_path / "one").write_text("-- extends 'base'\n#--- shared ---\none: 1\n")
    (tmp_path / "two").write_text("-- extends 'base'\n#--- shared ---\ntwo: 2\n")
    (tmp_path / "none").write_text("-- extends 'base'\n")
    environment = ConfigEnvironment(searchpath=(str(tmp_path),))
    texts = [render(environment, name).text.strip() for name in ("one", "two", "none", "one")]
    assert ["a: 1\none: 1", "a: 1\ntwo: 2", "a: 1", "a: 1\none: 1"] == texts


def test_the_templates_of_a_load_are_told_with_their_reasons(tmp_path):
    (tmp_path / "base").write_text(BASE)
    (tmp_path / "main").write_text("-- extends 'base'\n-- import 'lib' as lib\n#--- shared ---\nx: 1\n")
    (tmp_path / "lib").write_text("")
    rendered = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")
    assert [
        ("main", 1, "config", None, None),
        ("base", 1, "extends", 1, 0),
        ("lib", 1, "import", 2, 0),
        ("shared", 4, "include", 6, 1),
    ] == [(use.name, use.line, use.why, use.by and use.by.line, use.parent) for use in rendered.templates]


HOST = "t:\n-- block trainer_args\n  a: 1\n-- endblock\no:\n-- block optimizer\n  lr: 1\n-- endblock\n"


def test_a_header_that_its_indent_puts_into_another_block_is_an_error(tmp_path):
    (tmp_path / "base").write_text(HOST)
    (tmp_path / "main").write_text("-- extends 'base'\n[trainer_args]\n  b: 2\n\n    [optimizer]\n  lr: 3\n")
    (found,) = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main").diagnostics
    assert ("FG135", Severity.ERROR, 5) == (found.code, found.severity, found.span.line)
    assert found.message == (
        "the indent of '[optimizer]' puts it inside the block 'trainer_args'; "
        f"'base' has it outside, at {tmp_path}/base:6"
    )
    assert "write '[optimizer]' at the start of the line" == found.hint


def test_a_block_inside_another_is_no_mistake_where_nobody_has_it_elsewhere(findings):
    nested = "-- extends 'base'\n[trainer_args]\n  b: 2\n  [extra]\n  c: 3\n"
    assert [] == findings(base=HOST, main=nested)
    assert [] == findings(base=HOST, middle=nested, main="-- extends 'middle'\n[trainer_args]\n  [extra]\n  c: 4\n")


def test_a_long_block_does_not_end_a_bracket_block(findings):
    text = "-- extends 'base'\n[trainer_args]\n  b: 2\n-- block optimizer\n  lr: 3\n-- endblock optimizer\n"
    hint = "begin it with '[optimizer]', or end the other one with `-- endblock trainer_args`"
    assert [("FG135", Severity.ERROR, 4, hint)] == findings(base=HOST, main=text)


def test_a_block_inside_a_long_one_is_meant(findings):
    text = "-- extends 'base'\n-- block trainer_args\n  [optimizer]\n  lr: 3\n-- endblock trainer_args\n"
    assert [] == findings(base=HOST, main=text)


def test_a_text_that_cannot_be_loaded_is_explained_by_the_block_that_made_it_so(tmp_path):
    (tmp_path / "base").write_text(HOST)
    (tmp_path / "main").write_text("-- extends 'base'\n[trainer_args]\n  b: 2\n    [optimizer]\n  - 3\n")
    with pytest.raises(LoadError, match=r"main:4: \[FG135\] the indent of '\[optimizer\]'") as caught:
        load(render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main"))
    assert ["FG200"] == [other.code for other in caught.value.others]


PARENT = "args:\n-- block args\n    a: 1\n    b: 2\n    c: 3\n    d:\n      e: 1\n-- endblock\n"


@pytest.mark.parametrize(
    ("block", "severity"),
    [
        ("    a: 2\n", Severity.WARNING),
        ("    z: 1\n", Severity.LINT),
        ("    z: 1\n    a: 2\n", Severity.WARNING),
        ("    !dlist:@args\n    z: 1\n", Severity.LINT),
    ],
)
def test_a_block_without_super_that_drops_keys_of_its_parent_is_found(findings, block, severity):
    (found,) = findings(base=PARENT, main=f"-- extends 'base'\n[args]\n{block}")
    assert ("FG137", severity, 2) == found[:3]
    assert "`== super()`" in found[3]


@pytest.mark.parametrize(
    "block",
    [
        "    == super()\n    a: 2\n",
        "    {{ super() | trim }}\n    a: 2\n",
        "    !call:dict\n    a: 2\n",
        "    -- include 'own'\n    a: 2\n",
        "    - a\n",
        "    ~\n",
        "",
        "    {a: 1}\n",
        "    a: 2\n    b: 2\n",
    ],
)
def test_a_whole_replacement_and_one_that_keeps_the_parent_are_none(findings, block):
    assert [] == findings(base=PARENT, own="    z: 1\n", main=f"-- extends 'base'\n[args]\n{block}")


def test_what_the_parents_block_includes_or_takes_over_is_dropped_with_it(findings):
    base = "args:\n-- block args\n-- include 'more'\n-- endblock\n"
    middle = "-- extends 'base'\n[args]\n    == super()\n    d: 1\n"
    found = findings(
        base=base, more="    a: 1\n    b: 2\n    c: 3\n", middle=middle, main="-- extends 'middle'\n[args]\n    d: 2\n"
    )
    assert [("FG137", Severity.WARNING, 2)] == [item[:3] for item in found]


def test_a_block_of_sets_that_drops_one_which_is_read_is_found(findings):
    base = "-- set ns = namespace()\n-- block facts\n-- set ns.size = 1\n-- set ns.idle = 1\n-- endblock\na: {{ ns.size }}\n"
    child = "-- extends 'base'\n[facts]\n{super}-- set ns.idle = 2\n"
    dropped = findings(base=base.replace("{{ ns.size }}", "{{ ns.size | default(2) }}"), main=child.format(super=""))
    assert ("FG137", Severity.WARNING, 2) in [item[:3] for item in dropped]
    assert "FG137" not in [item[0] for item in findings(base=base, main=child.format(super="== super()\n"))]
