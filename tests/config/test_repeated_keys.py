"""Repeated keys from the templates to the graph: writer chains as real templates make them."""

import pytest
from documents import hazards

from forgather.config.environment import ConfigEnvironment
from forgather.config.load import load
from forgather.config.materialize import materialize
from forgather.config.render import render
from forgather.errors import LoadError

MACRO = "-- macro m(v)\na: {{ v }}\n-- endmacro\n"
BASE = "main:\n  [args]\n  a: 1\n  b: 2\n"
CONFLICT = r"\[FG206\] the key 'a' appears twice in one block with different values; the first is at "


@pytest.fixture
def values(tmp_path):
    """Returns the targets of the template `main`, and its findings as (severity, file, line)."""

    def run(**files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        graph = load(render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main"))
        places = [(str(item.severity), item.span.file.rpartition("/")[2], item.span.line) for item in graph.diagnostics]
        return materialize(graph), places

    return run


def test_a_child_overrides_through_super_over_three_levels(values):
    middle = "-- extends 'base'\n[args]\n    == super()\n  a: 3\n"
    made = values(base=BASE, middle=middle, main="-- extends 'middle'\n[args]\n    == super()\n  a: 5\n")
    assert ({"main": {"a": 5, "b": 2}}, []) == made


def test_a_child_that_repeats_itself_below_super_is_an_error(values):
    with pytest.raises(LoadError, match=rf"main:5: {CONFLICT}\S+main:4"):
        values(base=BASE, main="-- extends 'base'\n[args]\n    == super()\n  a: 5\n  a: 6\n")


def test_super_printed_twice_is_a_lint_for_each_line(values):
    made = values(base=BASE, main="-- extends 'base'\n[args]\n    == super()\n    == super()\n")
    assert ({"main": {"a": 1, "b": 2}}, [("lint", "base", 3), ("lint", "base", 4)]) == made


def test_each_level_of_a_sub_template_that_extends_its_own_name_is_a_template_of_its_own(values):
    outer = "main:\n-- include 'part'\n#--- part ---\n  [b]\n  a: 1\n  c: 1\n"
    override = "#--- part ---\n-- extends 'part'\n[b]\n  == super()\n  a: {}\n"
    made = values(
        base=outer,
        middle="-- extends 'base'\n" + override.format(2),
        main="-- extends 'middle'\n" + override.format(3),
    )
    assert ({"main": {"a": 3, "c": 1}}, []) == made


def test_a_line_above_super_in_a_sub_template_is_a_lint_too(values):
    outer = "main:\n-- include 'part'\n#--- part ---\n  [b]\n  a: 1\n"
    main = "-- extends 'base'\n#--- part ---\n-- extends 'part'\n[b]\n  a: 2\n  == super()\n"
    assert ({"main": {"a": 1}}, [("lint", "main", 5)]) == values(base=outer, main=main)


def test_includes_of_two_templates_override_and_one_template_twice_does_not(values):
    made, found = values(one="a: 1\n", two="a: 2\n", main="-- include 'one'\n-- include 'two'\n")
    assert ({"a": 2}, []) == (made, found)
    assert [("lint", "one", 1)] == values(main="-- include 'one'\n-- include 'one'\n")[1]
    with pytest.raises(LoadError, match=CONFLICT):
        values(one="a: {{ x }}\n", main="-- set x = 1\n-- include 'one'\n-- set x = 2\n-- include 'one'\n")


def test_a_line_beside_the_include_beats_the_included_one_where_it_stands_later(values):
    assert {"a": 2} == values(one="a: 1\n", main="-- include 'one'\na: 2\n")[0]
    assert {"a": 1} == values(one="a: 1\n", main="a: 2\n-- include 'one'\n")[0]


def test_a_macro_of_another_file_can_be_overridden_and_one_of_this_block_cannot(values):
    assert {"a": 3} == values(macros=MACRO, main="-- from 'macros' import m\n== m(1)\na: 3\n")[0]
    with pytest.raises(LoadError, match=CONFLICT):
        values(main="-- from 'macros' import m\n== m(1)\n== m(2)\n")
    with pytest.raises(LoadError, match=CONFLICT):
        values(main=MACRO + "== m(1)\na: 3\n")


def test_a_loop_may_repeat_a_value_but_not_change_it(values):
    assert ({"a": 0}, [("lint", "main", 2)]) == values(main="-- for i in [1, 2]\na: 0\n-- endfor\n")
    with pytest.raises(LoadError, match=CONFLICT):
        values(main="-- for i in [1, 2]\na: {{ i }}\n-- endfor\n")


def test_what_a_filter_took_apart_is_a_lint_only(values):
    main = "-- set text\na: {}\n-- endset\n-- for i in [1, 2]\n== text | replace('{}', i) | upper\n-- endfor\n"
    assert ({"A": 2}, [("lint", "main", 5)]) == values(main=main)


@pytest.mark.parametrize(
    "body",
    [
        "    == super.super()\n",
        "    => super()\n\n",
        "-- set kept = super()\n== kept\n",
        "-- set kept\n== super()\n-- endset\n== kept\n",
        "-- for i in [1]\n== super()\n-- endfor\n",
        "-- filter indent(0)\n== super()\n-- endfilter\n",
        "-- macro same(text)\n{{ text }}\n-- endmacro\n== same(super())\n",
    ],
)
def test_super_is_transparent_however_it_is_printed(values, body):
    middle = "-- extends 'base'\n[args]\n    == super()\n  a: 3\n"
    made = values(base=BASE, middle=middle, main=f"-- extends 'middle'\n[args]\n{body}  a: 5\n")
    assert ({"main": {"a": 5, "b": 2}}, []) == made


def test_an_override_that_changes_nothing_is_a_lint_that_names_the_first_line(tmp_path):
    base = "main:\n  [args]\n  a: 1\n  b: [x, {c: 2}]\n"
    text = "-- extends 'base.yaml'\n[args]\n    == super()\n  b: [x, {c: 2}]\n  a: 1.0\n"
    assert [
        "main.yaml:4: lint[FG233]: 'b' overrides the line at base.yaml:4 with the same value "
        "(remove the line; or keep it, if the value must stay when that line changes)"
    ] == hazards(tmp_path, base=base, main=text)


def test_a_computed_value_that_is_the_same_this_time_is_no_idle_override(tmp_path):
    text = "-- extends 'base.yaml'\n[args]\n    == super()\n  a: {{ 3 - 2 }}\n"
    assert [] == hazards(tmp_path, base=BASE, main=text)


def test_an_override_of_an_override_is_compared_with_the_nearest(tmp_path):
    middle = "-- extends 'base.yaml'\n[args]\n    == super()\n  a: 3\n"
    back = "-- extends 'middle.yaml'\n[args]\n    == super()\n  a: 1\n"
    assert [] == hazards(tmp_path, base=BASE, middle=middle, main=back)


def test_an_option_that_beats_the_configs_line_is_no_finding(tmp_path):
    files = {
        "base.yaml": "main:\n  [args]\n  a: 1\n  -- endblock\n-- if a is defined\n  a: {{ a }}\n-- endif\n",
        "main.yaml": "-- extends 'base.yaml'\n[args]\n  == super()\n  a: 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    graph = load(render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main.yaml", {"a": 3}))
    assert ({"main": {"a": 3}}, ()) == (materialize(graph), graph.diagnostics)


WITH_BLOCK = "ns: 1\nargs: &args\n-- block args\n  a: 1\n-- endblock args\nmain: *args\n"


@pytest.mark.parametrize(
    ("parent", "child", "severity", "effect"),
    [
        ("-- block head\n-- endblock head\n" + WITH_BLOCK, "[head]\nargs:\n  a: 2\n", "error", "is overridden by"),
        (WITH_BLOCK + "-- block tail\n-- endblock tail\n", "[tail]\nargs:\n  a: 2\n", "warning", "does not change"),
    ],
)
def test_a_target_in_place_of_a_block_is_said_to_be_meant_as_one(tmp_path, parent, child, severity, effect):
    (tmp_path / "base").write_text(parent)
    (tmp_path / "main").write_text("-- extends 'base'\n" + child)
    (found,) = load(render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")).diagnostics
    assert ("FG225", severity, 3) == (found.code, str(found.severity), found.span.line)
    assert effect in found.message
    assert "write the block [args]" in found.hint


def test_a_target_within_its_own_block_is_to_be_removed(tmp_path):
    (tmp_path / "base").write_text(WITH_BLOCK)
    (tmp_path / "main").write_text("-- extends 'base'\n[args]\nargs: &args\n  a: 2\n")
    (found,) = load(render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")).diagnostics
    assert ("FG225", 3) == (found.code, found.span.line)
    assert found.hint.startswith("remove `args:` from this line")
    (tmp_path / "main").write_text("-- extends 'base'\n[args]\n  a: 2\n")
    assert () == load(render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")).diagnostics
