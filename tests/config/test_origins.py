import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render
from forgather.source import variable_of


@pytest.fixture
def origins(tmp_path):
    """Gives a function that renders `main` and returns (line, sites, sets, approximate) of the lines with text."""

    def run(**files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        rendered = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")
        return [
            (
                line.strip(),
                [(site.template, site.span.line, site.block) for site in origin.sites],
                [site.span.line for site in origin.sets],
                origin.approximate,
            )
            for line, origin in rendered.source_map.lines()
            if line.strip()
        ]

    return run


def test_a_line_of_text_is_its_own_origin(origins):
    assert [("a: 1", [("main", 1, None)], [], False), ("b: 2", [("main", 3, None)], [], False)] == origins(
        main="a: 1\n\nb: 2\n"
    )


def test_the_block_is_the_innermost_one(origins):
    found = origins(main="[a]\nx: 1\n  [b]\n  y: 1\n[c]\nz: 1\n")
    assert [
        ("x: 1", [("main", 2, "a")], [], False),
        ("y: 1", [("main", 4, "b")], [], False),
        ("z: 1", [("main", 6, "c")], [], False),
    ] == found


def test_super_adds_no_site(origins):
    found = origins(
        main="-- extends 'base'\n[a]\n== super()\n== super() | indent(2)\nlr: 1\n",
        base="-- block a\nlr: 0\nwd: 0\n-- endblock\n",
    )
    parent = [("lr: 0", [("base", 2, "a")], [], False), ("wd: 0", [("base", 3, "a")], [], False)]
    assert [*parent, *parent, ("lr: 1", [("main", 5, "a")], [], False)] == found


def test_super_stays_transparent_through_a_capture(origins):
    found = origins(
        main="-- extends 'base'\n[a]\n-- set s\n== super()\nmine: 1\n-- endset\n== s | replace('lr', 'rate')\n",
        base="-- block a\nlr: 0\n-- endblock\n",
    )
    assert [("base", 2, "a")] == found[0][1]
    assert [("main", 7, "a"), ("main", 5, "a")] == found[1][1]


def test_a_block_printed_elsewhere_gets_the_site_that_prints_it(origins):
    found = origins(
        main="-- extends 'base'\n[a]\n== super()\nmine: 1\n",
        base="-- block a\nlr: 0\n-- endblock\ncopy:\n  == self.a() | indent(2)\n",
    )
    assert [("base", 5, None), ("base", 2, "a")] == found[3][1]
    assert [("base", 5, None), ("main", 4, "a")] == found[4][1]


def test_an_include_adds_its_site_each_time(origins):
    found = origins(main="-- include 'part'\n-- include 'part'\n", part="-- include 'leaf'\nk: 1\n", leaf="z: 1\n")
    leaf, own = ("part", 1, None), ("part", 2, None)
    assert [
        [("main", 1, None), leaf, ("leaf", 1, None)],
        [("main", 1, None), own],
        [("main", 2, None), leaf, ("leaf", 1, None)],
        [("main", 2, None), own],
    ] == [sites for _, sites, _, _ in found]


def test_a_sub_template_that_extends_is_seen_through_its_include(origins):
    found = origins(
        main="-- include 'sub'\n#--- sub ---\n-- extends 'base'\n[a]\n== super()\nlr: 1\n",
        base="-- block a\nlr: 0\n-- endblock\n",
    )
    assert [[("main", 1, None), ("base", 2, "a")], [("main", 1, None), ("sub", 6, "a")]] == [item[1] for item in found]


def test_a_macro_call_is_a_site(origins):
    found = origins(main="-- macro m(x)\nk: {{ x }}\n-- endmacro\n== m(1)\n== m(2)\n")
    assert [[("main", 4, None), ("main", 2, None)], [("main", 5, None), ("main", 2, None)]] == [
        item[1] for item in found
    ]


def test_a_call_block_is_a_site_for_the_macro_and_the_macro_for_the_body(origins):
    found = origins(
        main="-- macro wrap()\nhead: 1\n{{ caller() }}-\n-- endmacro\n-- call wrap()\nbody: 1\n-- endcall\n"
    )
    assert [("main", 5, None), ("main", 2, None)] == found[0][1]
    assert [("main", 5, None), ("main", 3, None), ("main", 6, None)] == found[1][1]


def test_an_imported_macro_is_in_its_own_template(origins):
    found = origins(main="-- import 'lib' as lib\n== lib.m()\n", lib="-- macro m()\nk: 1\n-- endmacro\n")
    assert [("k: 1", [("main", 2, None), ("lib", 2, None)], [], False)] == found


def test_a_printed_value_names_the_last_set_of_each_name(origins):
    found = origins(main="-- set a = 1\n-- set b = 2\n-- set a = 3\n{{ a + b }}\n")
    assert [("5", [("main", 4, None)], [3, 2], False)] == found


def test_a_set_in_a_block_is_forgotten_after_the_block(origins):
    found = origins(main="-- set a = 1\n[x]\n-- set a = 2\n{{ a }}\n[y]\n{{ a }}\n")
    assert [("2", [3]), ("1", [1])] == [(line, sets) for line, _, sets, _ in found]


def test_a_child_sets_what_the_parent_prints(origins):
    found = origins(main="-- extends 'base'\n-- set lr = 3\n", base="{{ lr }}\n")
    assert [("3", [("base", 1, None)], [2], False)] == found


def test_an_attribute_of_a_namespace_remembers_its_own_line(origins):
    found = origins(
        main="-- set ns = namespace(a=1, b=2)\n-- if true\n-- set ns.a = 3\n-- endif\n{{ ns.a }}\n{{ ns.b }}\n"
    )
    assert [("3", [3]), ("2", [1])] == [(line, sets) for line, _, sets, _ in found]


def test_a_namespace_that_an_include_sets_remembers_the_line_in_the_include(origins):
    found = origins(main="-- set ns = namespace()\n-- include 'part'\n{{ ns.a }}\n", part="-- set ns.a = 5\n")
    assert [("5", [("main", 3, None)], [1], False)] == found


def test_captured_text_keeps_its_lines_and_gains_the_printing_line(origins):
    found = origins(main="-- set body\na: 1\n\n  b: 2\n-- endset\nk:\n  == body | indent(2)\n")
    assert [
        ("k:", [("main", 6, None)]),
        ("a: 1", [("main", 7, None), ("main", 2, None)]),
        ("b: 2", [("main", 7, None), ("main", 4, None)]),
    ] == [(line, sites) for line, sites, _, _ in found]
    assert [[], [1], [1]] == [sets for _, _, sets, _ in found]


@pytest.mark.parametrize("filters", ["trim", "trim | trim", "replace('a', 'q')", "indent(4)", "string", "default('x')"])
def test_filters_that_keep_the_lines(origins, filters):
    found = origins(main=f"-- set body\n\na: 1\nb: 2\n\n-- endset\n== body | {filters}\n")
    assert [[("main", 7, None), ("main", 3, None)], [("main", 7, None), ("main", 4, None)]] == [
        item[1] for item in found
    ]
    assert {False} == {item[3] for item in found}


@pytest.mark.parametrize(
    "expression",
    ["body.strip()", "body.replace('a', 'q')", "body[1:]", "body ~ ''", "body + '\\n'", "[body, body] | join('')"],
)
def test_expressions_that_keep_the_lines(origins, expression):
    found = origins(main=f"-- set body\n\na: 1\nb: 2\n-- endset\n== {expression}\n")
    assert [("main", 6, None), ("main", 3, None)] == found[0][1]
    assert [("main", 6, None), ("main", 4, None)] == found[1][1]


@pytest.mark.parametrize(
    "expression",
    [
        "body | upper",
        "body | title",
        "body | tojson",
        "body.upper()",
        "body.split() | first",
        "body | wordwrap(9)",
        "body * 2",
    ],
)
def test_where_a_filter_takes_the_text_apart_the_printing_line_is_the_approximate_origin(origins, expression):
    found = origins(main=f"-- set body\na: 1\n-- endset\n== {expression}\n")
    assert [([("main", 4, None)], [1], True)] * len(found) == [item[1:] for item in found]


def test_a_filter_block_keeps_or_loses_the_lines_of_its_body(origins):
    found = origins(main="-- filter indent(2)\na: 1\nb: 2\n-- endfilter\n-- filter upper\nc: 1\n-- endfilter\n")
    assert [("main", 2, None)] == found[0][1]
    assert [("main", 3, None)] == found[1][1]
    assert ("C: 1", [("main", 5, None)], [], True) == found[2]


def test_a_loop_writes_the_same_line_many_times(origins):
    found = origins(main="-- for i in range(2)\nk{{ i }}: 1\n-- endfor\n")
    assert [[("main", 2, None)], [("main", 2, None)]] == [item[1] for item in found]


def sets_of(found):
    return [(line, sets) for line, _, sets, _ in found]


def test_a_set_in_a_loop_is_forgotten_in_the_next_turn_and_after_the_loop(origins):
    found = origins(
        main="-- set a = 1\n-- for i in [1, 2]\n-- if i == 1\n-- set a = 2\n-- endif\n{{ a }}\n-- endfor\n{{ a }}\n"
    )
    assert [("2", [4]), ("1", [1]), ("1", [1])] == sets_of(found)


def test_a_set_in_a_loop_is_forgotten_where_the_loop_is_left_early(origins):
    found = origins(main="-- set a = 1\n-- for i in [1, 2]\n-- set a = 2\n-- break\n-- endfor\n{{ a }}\n")
    assert [("1", [1])] == sets_of(found)


def test_a_set_in_the_else_of_a_loop_is_forgotten_after_it(origins):
    found = origins(main="-- set a = 1\n-- for i in []\n-- else\n-- set a = 2\n{{ a }}\n-- endfor\n{{ a }}\n")
    assert [("2", [4]), ("1", [1])] == sets_of(found)


def test_a_name_of_a_loop_is_set_by_the_loop_and_by_what_it_goes_over(origins):
    found = origins(main="-- set a = [1]\n-- for i in a\n{{ i }}\n-- endfor\n")
    assert [("1", [2, 1])] == sets_of(found)


def test_over_a_literal_list_each_turn_names_its_own_item(origins):
    found = origins(
        main="-- set a = 1\n-- set b = 2\n-- for k, v in [('x', a), ('y', b | default(3))]\n{{ k }}: {{ v }}\n-- endfor\n"
    )
    assert [("x: 1", [3]), ("y: 2", [3])] == sets_of(found)
    found = origins(
        main="-- set a = 1\n-- set b = 2\n-- for v in [a, b]\n{{ v }}\n-- endfor\n-- for v in [a, b] if v > 1\n"
        "{{ v }}\n-- endfor\n"
    )
    assert [("1", [3, 1]), ("2", [3, 2]), ("2", [6, 1, 2])] == sets_of(found)


def test_a_loop_over_attributes_of_a_namespace_names_the_lines_that_set_them(origins):
    found = origins(main="-- set ns = namespace()\n-- set ns.a = 1\n-- for v in [ns.a]\n{{ v }}\n-- endfor\n")
    assert [("1", [3, 2])] == sets_of(found)


def test_a_loop_that_calls_itself_keeps_the_lines_apart(origins):
    found = origins(
        main="-- set a = [[[]]]\n-- for i in a recursive\n-- set n = 1\n{{ loop(i) }}{{ n }}\n-- endfor\n{{ n | default(0) }}\n"
    )
    assert [6] not in [sets for _, sets in sets_of(found)]
    assert [] == found[-1][2]


def test_a_with_is_the_set_of_its_names(origins):
    found = origins(main="-- set a = 1\n-- with a = 2\n{{ a }}\n-- set a = 3\n{{ a }}\n-- endwith\n{{ a }}\n")
    assert [("2", [2]), ("3", [4]), ("1", [1])] == sets_of(found)


@pytest.mark.parametrize("around", ["-- set t\n{}-- endset\n", "-- filter upper\n{}-- endfilter\n"])
def test_a_set_in_a_captured_or_filtered_text_is_forgotten_after_it(origins, around):
    found = origins(main="-- set a = 1\n" + around.format("-- set a = 2\n") + "{{ a }}\n")
    assert ("1", [1]) == sets_of(found)[-1]


def test_a_parameter_of_a_macro_is_not_the_name_outside(origins):
    found = origins(main="-- set x = 1\n-- set y = 2\n-- macro m(x)\n{{ x }}\n-- endmacro\n== m(y)\n")
    assert [("2", [("main", 6, None), ("main", 4, None)], [2], False)] == found


def test_a_call_block_names_what_it_hands_on(origins):
    found = origins(main="-- set y = 2\n-- macro m(x)\n{{ x }}{{ caller() }}\n-- endmacro\n-- call m(y)\n-- endcall\n")
    assert [("2", [1])] == sets_of(found)


@pytest.mark.parametrize(
    "imported", ["-- import 'lib' as lib\n{{ lib.a }}\n", "-- from 'lib' import a as b\n{{ b }}\n"]
)
def test_an_imported_name_is_set_in_the_template_it_comes_from(origins, imported):
    found = origins(main="-- set b = 0\n" + imported, lib="\n\n-- set a = 1\n")
    assert [("1", [3])] == sets_of(found)


def test_an_imported_macro_is_no_name_that_was_set(origins):
    found = origins(main="-- set m = 0\n-- from 'lib' import m\n== m()\n", lib="-- macro m()\nk: 1\n-- endmacro\n")
    assert [("k: 1", [])] == sets_of(found)


def test_a_variable_that_was_given_from_outside_is_named(tmp_path):
    (tmp_path / "main").write_text("a: {{ steps }}\n-- set steps = 2\nb: {{ steps }}\n")
    rendered = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main", {"steps": 1})
    given, own = [rendered.source_map.at(line, 4).sets for line in (1, 2)]
    assert ["<variable steps>"] == [site.span.file for site in given]
    assert ["steps", None] == [variable_of(given[0]), variable_of(own[0])]


def test_a_variable_from_outside_is_named_through_the_set_that_reads_it(tmp_path):
    text = "-- set n = steps | default(3)\n-- set m = n * 2\n-- set ns = namespace()\n-- set ns.k = m\n"
    (tmp_path / "main").write_text(text + "a: {{ m }}\nb: {{ ns.k }}\n")
    rendered = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main", {"steps": 1})
    places = [
        [str(site.span).removeprefix(f"{tmp_path}/") for site in rendered.source_map.at(n, 4).sets] for n in (1, 2)
    ]
    assert [["main:2", "<variable steps>:1"], ["main:4", "<variable steps>:1"]] == places
