"""Differences of two graphs: each kind of change, told once, at its line."""

import math
from collections import Counter
from random import Random

import pytest
from documents import graph_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_load_properties import GraphMaker

from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.environment import ConfigEnvironment
from forgather.config.graph import ContainerKind, Entry, Graph, Scalar, Sequence
from forgather.config.insight.diff import diff
from forgather.config.load import load
from forgather.config.override import override
from forgather.config.path import Key, format_path
from forgather.config.render import render
from forgather.config.traverse import children, roots, walk


def told(a, b):
    """Returns (change, path, old, new) of each difference of two documents."""
    return [(str(d.change), format_path(d.path), d.old.text, d.new.text) for d in diff(graph_of(a), graph_of(b))]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a: 1", "a: 2", [("value", "a", "1", "2")]),
        ("a: 1", "a: 1.0", [("value", "a", "1", "1.0")]),
        ("a: 1", "a: true", [("value", "a", "1", "true")]),
        ("a: 1", "a: [1]", [("value", "a", "1", "[1]")]),
        ("a: 1", "a: 1\nb: {x: 1}", [("added", "b", "", "{x: 1}")]),
        ("a: 1\nb: 2", "b: 2", [("removed", "a", "1", "")]),
        ("a: {x: 1, y: 2}", "a: {y: 2, x: 1}", []),
        ("a: !list [1]", "a: [1]", []),
        ("a: !tuple [1]", "a: [1]", [("kind", "a", "!tuple", "!list")]),
        ("a: !list:@x [1]", "a: !list:@y [1]", [("name", "a", "@x", "@y")]),
        ("a: !call:m:f@x", "a: !call:m:f", [("name", "a", "@x", "no name")]),
        ("a: !singleton:m:f", "a: !partial:m:f", [("kind", "a", "!singleton", "!partial")]),
        ("a: !call:m:f {x: 1}", "a: !call:m:g {x: 1}", [("constructor", "a", "m:f", "m:g")]),
        (
            "a: !call:m:f {x: 1, y: 2, z: 3}",
            "a: !call:m:g {x: 1, y: 3, w: 4}",
            [("constructor", "a", "m:f", "m:g"), ("value", "a.y", "2", "3"), ("removed", "a.z", "3", ""),
             ("added", "a.w", "", "4")],
        ),
        ("a: !call:m:f [1, 2]", "a: !call:m:f [1, 3, 4]", [("value", "a[1]", "2", "3"), ("added", "a[2]", "", "4")]),
        ("a: !var x", "a: !var y", [("value", "a", "!var x", "!var y")]),
        ("a: !var {name: x, default: 1}", "a: !var {name: x, default: 2}", [("value", "a.default", "1", "2")]),
        ("a: !env X", "a: !var X", [("value", "a", "!env X", "!var X")]),
        ('a: !calc "1"', 'a: !calc "2"', [("value", "a", '!calc "1"', '!calc "2"')]),
        ("a: !call:m:f {x: 1}", "a: !call:m:f {latent_args: {x: 1}}", [("kind", "a", "x", "latent x")]),
        ("a: !dlist {x: 1, y: 2}", "a: !dlist {y: 2, x: 1}", [("order", "a", "[x, y]", "[y, x]")]),
        ("a: !dlist {x: 1, y: 2}", "a: !dlist {x: 1, y: ~}", [("removed", "a.y", "2", "")]),
        ("a: !dlist {x: 1, y: ~}", "a: !dlist {x: 1, y: 2}", [("added", "a.y", "", "2")]),
        ("a: !dlist {x: 1, y: ~}", "a: !dlist {x: 1}", []),
        ("a: !dlist {x: 1}", "a: {x: 1}", [("value", "a", "!dlist {x: 1}", "{x: 1}")]),
        (".d: 1\n.d: 2\na: 0", ".d: 1\n.d: 3\na: 0", [("value", "['.d']", "2", "3")]),
    ],
)  # fmt: skip
def test_each_change_is_told_once(old, new, expected):
    assert expected == told(old, new)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[a, b, c]", "[a, c]", [("removed", "x[1]", "b", "")]),
        ("[a, c]", "[a, b, c]", [("added", "x[1]", "", "b")]),
        ("[a, b, c]", "[c, a, b]", [("order", "x", "[a, b, c]", "[c, a, b]")]),
        ("[0.9, 0.95]", "[0.9, 0.999]", [("value", "x[1]", "0.95", "0.999")]),
        ("[!call:m:f {a: 1}, 2]", "[0, !call:m:f {a: 3}, 2]", [("added", "x[0]", "", "0"), ("value", "x[1].a", "1", "3")]),
        ("[{a: 1}, {b: 2}]", "[{b: 2}]", [("removed", "x[0]", "{a: 1}", "")]),
        ("[a, a, b]", "[a, b]", [("removed", "x[0]", "a", "")]),
    ],
)  # fmt: skip
def test_items_are_compared_with_their_counterparts(old, new, expected):
    assert expected == told(f"x: {old}", f"x: {new}")


def test_a_list_of_thousands_is_compared_item_by_item():
    old = Graph(targets={"a": Entry("a", long_list(range(9000)))})
    new = Graph(targets={"a": Entry("a", long_list([0, -1, *range(2, 9001)]))})

    assert ["a[1]", "a[9000]"] == [format_path(d.path) for d in diff(old, new)]


def long_list(numbers):
    return Sequence(kind=ContainerKind.LIST, items=tuple(Scalar(value=number) for number in numbers))


def test_a_graph_as_deep_as_one_can_make_it_in_python_is_compared():
    def deep(value):
        node = Scalar(value=value)
        for _ in range(5000):
            node = Sequence(kind=ContainerKind.LIST, items=(node,))
        return Graph(targets={"a": Entry("a", node)})

    (found,) = diff(deep(1), deep(2))

    assert (5001, "1", "2") == (len(found.path), found.old.text, found.new.text)


SHARED = "a: &a !singleton:m:f {x: 1}\nb: {in: *a}\nc: *a\n"


def test_a_change_inside_a_shared_value_is_told_at_its_first_path_with_the_others():
    (found,) = diff(graph_of(SHARED), graph_of(SHARED.replace("1", "2")))

    assert "a.x" == format_path(found.path)
    assert ["b.in.x", "c.x"] == [format_path(path) for path in found.also]


def test_one_object_that_becomes_two_and_the_reverse():
    apart = "a: &a !singleton:m:f {x: 1}\nb: {in: !singleton:m:f {x: 1}}\nc: *a\n"

    (found,) = diff(graph_of(SHARED), graph_of(apart))
    (back,) = diff(graph_of(apart), graph_of(SHARED))

    assert ("apart", "b.in", "a") == (found.change, format_path(found.path), format_path(found.partner))
    assert ("shared", "b.in", "a") == (back.change, format_path(back.path), format_path(back.partner))
    assert (2, 2) == (found.old.origin.span.line, found.new.origin.span.line)


def test_what_is_inside_of_an_object_that_was_split_is_told_only_where_it_differs():
    old = "a: &a !singleton:m:f {x: !singleton:m:g {y: [1]}}\nb: *a\n"
    new = "a: !singleton:m:f {x: !singleton:m:g {y: [1]}}\nb: !singleton:m:f {x: !singleton:m:g {y: [2]}}\n"

    assert [("apart", "b"), ("value", "b.x.y[0]")] == [(what, path) for what, path, _, _ in told(old, new)]


def test_two_factories_that_are_alike_build_what_one_built():
    assert [] == told("a: &a !factory:m:f {x: 1}\nb: *a", "a: !factory:m:f {x: 1}\nb: !factory:m:f {x: 1}")


def test_an_alias_that_is_added_is_told_as_an_alias():
    assert [("added", "b", "", "*a")] == told("a: &a [1]", "a: &a [1]\nb: *a")


def test_of_two_long_texts_the_part_that_differs_is_shown():
    text = "word " * 40

    ((_, _, old, new),) = told(f"a: {text}one", f"a: {text}two")

    assert ("...'word word word word one'...", "...'word word word word two'...") == (old, new)


# places


@pytest.fixture
def graphs(tmp_path):
    """Gives a function that loads the templates `a` and `b` out of texts, and returns a function for short places."""

    def run(**files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        environment = ConfigEnvironment(searchpath=(str(tmp_path),))
        return [load(render(environment, name)) for name in ("a", "b")]

    return run


def place(side):
    return side.origin and f"{side.origin.span.file.rpartition('/')[2]}:{side.origin.span.line}"


def places(a, b):
    return [(str(d.change), format_path(d.path), place(d.old), place(d.new)) for d in diff(a, b)]


BASE = "opt: !call:m:f\n-- block opt\n  x: 1\n  y: 2\n-- endblock\n"


def test_each_side_names_the_line_that_wrote_it(graphs):
    found = graphs(base=BASE, a="-- extends 'base'\n", b="-- extends 'base'\n[opt]\n  == super()\n  x: 3\n  z: 4\n")

    assert [("value", "opt.x", "base:3", "b:4"), ("added", "opt.z", None, "b:5")] == places(*found)


def test_a_key_that_a_block_took_away_names_the_block_that_did(graphs):
    found = graphs(base=BASE, a="-- extends 'base'\n", b="-- extends 'base'\n\n[opt]\n  x: 1\n")

    assert [("removed", "opt.y", "base:4", "b:4")] == places(*found)


def test_a_key_that_is_gone_from_its_own_file_names_no_remover(graphs):
    found = graphs(a="opt: {x: 1, y: 2}\n", base=BASE, b="-- extends 'base'\n")
    removed = graphs(base="-- block o\nopt:\n  x: 1\n-- endblock\n", a="-- extends 'base'\n[o]\n  == super()\n  y: 1\n",
                     b="-- extends 'base'\n")  # fmt: skip

    assert ("value", "opt", "a:1", "base:1") == places(*found)[0]
    assert [("removed", "opt.y", "a:4", None)] == places(*removed)


def test_a_value_that_became_an_alias_names_the_alias(graphs):
    found = graphs(a="x: &x 1\ny: 2\n", b="x: &x 1\ny:\n  *x\n")

    assert [("value", "y", "a:2", "b:2")] == places(*found)


# properties

# Steps that `--set` cannot name, or that may name two things.
UNNAMED = [repr(Key(value)) for value in (math.inf, -math.inf, math.nan, "submodule_searchpath")]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_a_graph_does_not_differ_from_itself_nor_from_what_was_written_and_read(seed):
    graph = GraphMaker(seed).graph()
    if graph.targets or graph.definitions:
        assert () == diff(graph, graph)
        assert () == diff(graph, graph_of(emit_yaml(graph)))


def _twice(graph):
    """Paths with a step that a call has as a keyword and as a latent one: which of the two is meant is open."""
    steps = {}
    for path, node in walk(roots(graph)):
        for step, count in Counter(step for step, _ in children(node)).items():
            if count > 1:
                steps[(*path, step)] = None
    return [path for path, _ in walk(roots(graph)) if any(path[: len(start)] == start for start in steps)]


def test_one_of_two_equal_neighbors_changes_in_its_place(graphs):
    found = graphs(a="x: [1, 1]\n", b="x: [2, 1]\n")

    assert [("value", "x[0]", "a:1", "b:1")] == places(*found)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_an_override_differs_at_its_path_alone(seed):
    graph = GraphMaker(seed).graph()
    plain = [path for path, node in walk(roots(graph)) if isinstance(node, Scalar) and node.value is not None]
    values = [path for path in plain if not any(repr(step) in UNNAMED for step in path) and path not in _twice(graph)]
    if values:
        path = Random(seed).choice(values)
        (found,) = diff(graph, override(graph, [(format_path(path), "changed")]))
        assert (path, "changed") == (found.path, found.new.text)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_any_two_graphs_can_be_compared_both_ways(one, other):
    a, b = GraphMaker(one).graph(), GraphMaker(other).graph()
    mirrored = {"added": "removed", "removed": "added", "apart": "shared", "shared": "apart"}

    forth = [str(d.change) for d in diff(a, b) if d.change not in ("order", "shared", "apart")]
    back = [str(d.change) for d in diff(b, a) if d.change not in ("order", "shared", "apart")]

    assert bool(forth) == bool(back)
    assert forth.count("removed") - forth.count("added") == sum(
        (mirrored.get(word, word) == "removed") - (mirrored.get(word, word) == "added") for word in back
    )
