"""Blame: every way in which a value gets its place."""

from pathlib import Path

import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.insight.blame import blame, value_text
from forgather.config.load import load, load_value
from forgather.config.override import override
from forgather.config.path import Key, format_path
from forgather.config.render import render


@pytest.fixture
def blame_of(tmp_path):
    """Gives a function that loads `main`, with `--set` as in `sets`, and returns the Blame of each path."""

    def run(*, sets=(), variables=None, **files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        rendered = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main", variables or {})
        graph = override(load(rendered), list(sets))
        return {format_path(item.path): item for item in blame(graph)}

    return run


@pytest.fixture
def blamed(blame_of):
    """Gives a function that loads `main` and returns path -> [(text, file:line), ...], now first."""

    def run(**files):
        return {path: writings(item) for path, item in blame_of(**files).items()}

    return run


def writings(item):
    return [(writing.text, line(writing.origin)) for writing in (item.now, *item.was)]


def line(origin):
    return f"{Path(origin.span.file).name}:{origin.span.line}"


def sites(origin):
    return [f"{Path(site.span.file).name}:{site.span.line}" for site in origin.sites]


def sets(origin):
    return [f"{Path(site.span.file).name}:{site.span.line}" for site in origin.sets]


def through(writing):
    return [line(origin) for origin in writing.through]


def test_a_value_is_blamed_on_its_line_and_remembers_each_it_replaced(blamed):
    found = blamed(
        base="-- block args\nargs:\n  lr: 1\n  wd: 0\n-- endblock\n",
        project="-- extends 'base'\n[args]\n== super()\n  lr: 2\n",
        main="-- extends 'project'\n\n[args]\n== super()\n  lr: 3\n",
    )
    assert [("3", "main:5"), ("2", "project:4"), ("1", "base:3")] == found["args.lr"]
    assert [("0", "base:4")] == found["args.wd"]


def test_a_value_inside_a_replaced_container_remembers_what_stood_at_its_path(blamed):
    found = blamed(
        base="-- block args\nargs:\n  betas: [0.8, 0.99]\n-- endblock\n",
        main="-- extends 'base'\n[args]\n== super()\n  betas: [0.9, 0.95, 1]\n",
    )
    assert [("[0.9, 0.95, 1]", "main:4"), ("[0.8, 0.99]", "base:3")] == found["args.betas"]
    assert [("0.9", "main:4"), ("0.8", "base:3")] == found["args.betas[0]"]
    assert [("1", "main:4")] == found["args.betas[2]"]


def test_super_printed_twice_blames_both_copies_on_the_one_line(blamed):
    found = blamed(
        base="-- block args\nx:\n  lr: 1\n-- endblock\n",
        main="-- extends 'base'\n[args]\n== super()\n== super() | replace('x:', 'y:')\n",
    )
    assert [("1", "base:3")] == found["x.lr"] == found["y.lr"]


def test_an_include_inside_an_include_is_a_chain(blame_of):
    found = blame_of(main="a: 1\n-- include 'one'\n", one="-- include 'two'\n", two="\nb: 2\n")
    assert ["main:2", "one:1", "two:2"] == sites(found["b"].now.origin)


def test_a_macro_is_blamed_on_its_own_line_and_on_the_call(blame_of):
    found = blame_of(
        main="-- from 'lib' import args\nx:\n== args(3)\n", lib="-- macro args(lr)\n  lr: {{ lr }}\n-- endmacro\n"
    )
    assert ["main:3", "lib:2"] == sites(found["x.lr"].now.origin)


def test_the_body_of_a_call_block_is_blamed_on_its_own_line(blame_of):
    found = blame_of(main="-- macro wrap()\nx:\n{{ caller() }}\n-- endmacro\n-- call wrap()\n  lr: 3\n-- endcall\n")
    assert "main:6" == sites(found["x.lr"].now.origin)[-1]


@pytest.mark.parametrize(
    "value", ["{{ lr }}", '"{{ lr }}"', "x{{ lr }}", "'{{ lr }}y'", "!call:int {{ lr }}", "!call:dict:{{ lr }}"]
)
def test_a_printed_value_names_its_line_and_the_set_wherever_in_the_value_it_is_printed(blame_of, value):
    found = blame_of(main=f"-- set lr = 'abc'\nx: {value}\n")
    assert ["main:2"] == sites(found["x"].now.origin)
    assert ["main:1"] == sets(found["x"].now.origin)


def test_a_tag_names_what_it_was_printed_from_and_not_what_its_arguments_were(blame_of):
    found = blame_of(
        main="-- set cls = 'dict'\n-- set lr = 1\nx: !call:{{ cls }}\n  lr: {{ lr }}\ny: !call:dict {lr: {{ lr }}}\n"
    )
    assert (["main:1"], ["main:2"]) == (sets(found["x"].now.origin), sets(found["x.lr"].now.origin))
    assert ([], ["main:2"]) == (sets(found["y"].now.origin), sets(found["y.lr"].now.origin))


def test_an_attribute_of_a_namespace_names_the_child_that_set_it(blame_of):
    found = blame_of(
        base="-- set ns = namespace(lr=1)\n-- block facts\n-- endblock\nx: {{ ns.lr }}\n",
        main="-- extends 'base'\n[facts]\n-- set ns.lr = 2\n",
    )
    assert ("2", ["base:4"], ["main:3"]) == (
        found["x"].now.text,
        sites(found["x"].now.origin),
        sets(found["x"].now.origin),
    )


def test_a_loop_is_blamed_on_the_line_in_its_body_and_on_what_it_goes_over(blame_of):
    text = "-- for k, v in [('a', a | default(none)), ('b', 3)]\n{{ k }}: {{ v }}\n-- endfor\n"
    found = blame_of(main=text, variables={"a": 7})
    assert ("7", ["main:2"], ["main:1", "<variable a>:1"]) == (
        found["a"].now.text,
        sites(found["a"].now.origin),
        sets(found["a"].now.origin),
    )
    assert ["main:1"] == sets(found["b"].now.origin)


def test_where_a_filter_took_the_text_apart_the_printing_line_is_blamed_and_marked(blame_of):
    found = blame_of(main="-- set body\nx: abc\n-- endset\n== body | upper\n")
    assert (["main:4"], True) == (sites(found["X"].now.origin), found["X"].now.origin.approximate)


def test_a_value_that_several_lines_wrote_names_them_all(blame_of):
    found = blame_of(main='-- macro who()\nbob\n-- endmacro\nx: "hello {{ who() | trim }}"\ny: a\n  b\n')
    assert (["main:4"], ["main:2"]) == (
        sites(found["x"].now.origin),
        [str(s.span.line) and f"main:{s.span.line}" for s in found["x"].now.origin.parts],
    )
    assert [6] == [site.span.line for site in found["y"].now.origin.parts]


def test_an_alias_is_blamed_on_the_place_of_the_value_and_names_its_own_line(blame_of):
    found = blame_of(main=".lr: &lr 3e-4\na:\n  lr: *lr\nb: [1, *lr]\nc: !call:dict [*lr]\nd: !call:dict {arg0: *lr}\n")
    for path, number in (("a.lr", 3), ("b[1]", 4), ("c[0]", 5), ("d[0]", 6)):
        now = found[path].now
        assert ("3e-4", "main:1", "lr", [f"main:{number}"]) == (now.text, line(now.origin), now.alias, through(now)), (
            path
        )
    assert (None, []) == (found["b[0]"].now.alias, through(found["b[0]"].now))


def test_merge_keys_lead_through_each_of_their_lines(blame_of):
    found = blame_of(main=".a: &a\n  lr: &lr 1\n.b: &b\n  <<: *a\n  wd: *lr\nc:\n  <<: *b\n")
    assert ("main:2", "<<", ["main:7", "main:4"]) == (
        line(found["c.lr"].now.origin),
        found["c.lr"].now.alias,
        through(found["c.lr"].now),
    )
    assert ("main:2", "lr", ["main:7", "main:5"]) == (
        line(found["c.wd"].now.origin),
        found["c.wd"].now.alias,
        through(found["c.wd"].now),
    )


def test_what_beats_a_merged_key_remembers_it(blamed):
    found = blamed(main=".a: &a {lr: 1}\n.b: &b {lr: 2}\nc:\n  <<: *a\n  <<: *b\n  lr: 3\n")
    assert [("3", "main:6"), ("2", "main:2"), ("1", "main:1")] == found["c.lr"]


@pytest.mark.parametrize(
    ("base", "child", "path"),
    [
        ("  submodule_searchpath: [a]\n", "  submodule_searchpath: [b]\n", "x.submodule_searchpath[0]"),
        ("  arg0: a\n", "  arg0: b\n", "x[0]"),
        ("  args: [a]\n", "  args: [b]\n", "x[0]"),
        ("  kwargs: {k: a}\n", "  kwargs: {k: b}\n", "x.k"),
        ("  latent_args: {k: a}\n", "  latent_args: {k: b}\n", "x.k"),
    ],
)
def test_arguments_in_every_form_remember_what_they_replaced(blamed, base, child, path):
    found = blamed(
        base=f"x: !call:dict\n-- block x\n{base}-- endblock\n", main=f"-- extends 'base'\n[x]\n== super()\n{child}"
    )
    assert [("b", "main:4"), ("a", "base:3")] == found[path]


@pytest.mark.parametrize("form", ["args: *l\n", "args: [*v]\n"])
def test_an_alias_in_the_explicit_form_is_seen(blame_of, form):
    found = blame_of(main=f".v: &v 1\n.l: &l [1]\nx: !call:dict\n  {form}")
    assert ["main:4"] == through(found["x[0]"].now)


TREE = ".lr: &lr 1\n.base: &base {eps: 2}\na: {lr: *lr}\nb: {<<: *base}\nc: [3, *lr]\nd: !call:dict [4]\n"


@pytest.mark.parametrize(
    ("assignment", "path", "was"),
    [
        (("a.lr", "9"), "a.lr", [("1", "main:1", "lr")]),
        ((".lr", "9"), "a.lr", [("1", "main:1", "lr")]),
        ((".lr", "9"), "c[1]", [("1", "main:1", "lr")]),
        (("b.eps", "9"), "b.eps", [("2", "main:2", "<<")]),
        ((".base.eps", "9"), "b.eps", [("2", "main:2", "<<")]),
        ((".base.eps", "9"), "['.base'].eps", [("2", "main:2", None)]),
        (("c[0]", "9"), "c[0]", [("3", "main:5", None)]),
        (("c[1]", "9"), "c[1]", [("1", "main:1", "lr")]),
        (("d[0]", "9"), "d[0]", [("4", "main:6", None)]),
        (("+d[1]", "9"), "d[1]", []),
        (("+a.wd", "9"), "a.wd", []),
    ],
)
def test_set_on_the_command_line_remembers_the_line_in_the_file(blame_of, assignment, path, was):
    item = blame_of(main=TREE, sets=[assignment])[path]
    assert ("9", "<command line>:1") == writings(item)[0]
    assert was == [(writing.text, line(writing.origin), writing.alias) for writing in item.was]


def test_set_twice_remembers_both(blame_of):
    item = blame_of(main=TREE, sets=[("a.lr", "8"), ("a.lr", "9")])["a.lr"]
    assert [("9", "<command line>:1"), ("8", "<command line>:1"), ("1", "main:1")] == writings(item)


def test_an_alias_set_on_the_command_line_is_an_alias_from_then_on(blame_of):
    item = blame_of(main=TREE, sets=[("d[0]", "*lr"), ("a.lr", "*lr"), ("a.lr", "5")])
    assert ("1", "main:1", "lr", ["<command line>:1"]) == (
        item["d[0]"].now.text,
        line(item["d[0]"].now.origin),
        item["d[0]"].now.alias,
        through(item["d[0]"].now),
    )
    assert ("5", "1") == (item["a.lr"].now.text, item["c[1]"].now.text)


def test_blame_begins_where_it_is_told_and_knows_what_stood_above(tmp_path):
    (tmp_path / "base").write_text("-- block x\nx:\n  y: {z: 1}\n-- endblock\n")
    (tmp_path / "main").write_text("-- extends 'base'\n[x]\n== super()\n  y: {z: 2}\n")
    graph = load(render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main"))
    y = graph.targets["x"].value.entries[0].value
    tops = [((Key("x"), Key("y"), Key("z")), y.entries[0].value)]
    assert [["2", "1"]] == [[writing.text for writing in (item.now, *item.was)] for item in blame(graph, tops)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3e-4", "3e-4"),
        ("0o17", "0o17"),
        ("~", "~"),
        ("", "~"),
        ("a b", "a b"),
        ("'1'", '"1"'),
        ("[1, a, {b: 2}]", "[...] (3)"),
        ("[1e-3, a]", "[1e-3, a]"),
        ("{a: 1, b: x}", "{a: 1, b: x}"),
        ("!tuple [1, 2]", "!tuple [1, 2]"),
        ("!dlist:@cb {a: 1}", "!dlist:@cb {a: 1}"),
        ("!call:torch:nn.Linear@l [1]", "!singleton:torch:nn.Linear@l"),
        ("!var seed", "!var seed"),
        ("!env {name: HOME, default: 2}", "!env HOME (default 2)"),
        ("!calc '1 + x'", '!calc "1 + x"'),
        ("x" * 90, "x" * 57 + "..."),
    ],
)
def test_a_value_is_shown_on_one_line_as_it_was_written(text, expected):
    assert expected == value_text(load_value(text))
