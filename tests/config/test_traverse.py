from dataclasses import replace

import pytest
from documents import graph_of

from forgather.config import traverse
from forgather.config.equality import same_graph, same_value
from forgather.config.graph import Scalar
from forgather.config.path import format_path
from forgather.config.traverse import all_nodes, children, paths_to, rebuild, roots, shared_nodes, walk

CONFIG = """
.d: &d [1, 2]
a: !call:m:f
  args: [*d]
  kwargs: {x: !var {name: v, default: 3}}
  latent_args: {y: 4}
  submodule_searchpath: s
b: {c: *d, e: !calc 1}
"""


def test_walk_reaches_every_node_once_with_its_first_path():
    paths = [format_path(path) for path, _ in walk(roots(graph_of(CONFIG)))]
    assert [
        "a",
        "a[0]",
        "a[0][0]",
        "a[0][1]",
        "a.x",
        "a.x.default",
        "a.y",
        "a.submodule_searchpath",
        "b",
        "b.e",
    ] == paths


def test_all_nodes_are_those_of_a_walk_and_an_interrupted_one_leaves_nothing(monkeypatch):
    graph = graph_of(CONFIG)
    whole = list(walk(roots(graph)))

    def interrupted(node):
        if node is whole[1][1]:
            raise KeyboardInterrupt
        return children(node)

    with monkeypatch.context() as patch:
        patch.setattr(traverse, "children", interrupted)
        with pytest.raises(KeyboardInterrupt):
            all_nodes(graph)
    assert whole == list(all_nodes(graph))
    assert [] == list(all_nodes(replace(graph, targets={}, definitions=())))


def test_rebuild_gives_the_same_node_where_nothing_changes():
    for _, node in walk(roots(graph_of(CONFIG))):
        assert node is rebuild(node, lambda child: child)


def test_rebuild_exchanges_direct_children_only():
    for _, node in walk(roots(graph_of(CONFIG))):
        new = rebuild(node, lambda child: Scalar(value="new"))
        assert all(isinstance(child, Scalar) and child.value == "new" for _, child in children(new))
        assert len(list(children(node))) == len(list(children(new)))


def test_shared_nodes_are_those_with_several_edges():
    graph = graph_of(CONFIG)
    shared = graph.targets["a"].value.args[0]
    assert {id(shared)} == shared_nodes([node for _, node in roots(graph)])


def test_paths_to_a_node_are_all_of_them_up_to_a_limit():
    graph = graph_of("x: &x [1]\na: [*x, *x]\nb: {c: *x}\n")
    wanted = {id(graph.targets["x"].value)}
    assert ["x", "a[0]", "a[1]", "b.c"] == [format_path(path) for path, _ in paths_to(roots(graph), wanted, limit=9)]
    assert 2 == len(paths_to(roots(graph), wanted, limit=2))


def test_graphs_that_differ_in_sharing_alone_are_not_the_same():
    shared, apart = graph_of("a: &x [1]\nb: *x\n"), graph_of("a: [1]\nb: [1]\n")
    assert not same_graph(shared, apart)
    assert not same_graph(apart, shared)
    assert same_value(shared.targets["b"].value, apart.targets["b"].value)


def test_graphs_that_differ_in_places_alone_are_the_same():
    assert same_graph(graph_of("a: &x [1]\nb: *x\n"), graph_of("\n\na: &other\n- 1\n\nb: *other\n"))


def test_graphs_that_differ_anywhere_are_not_the_same():
    texts = ["a: 1\n", "a: true\n", "a: 1.0\n", "b: 1\n", "a: '1'\n", "a: [1]\n", "a: !list [1]\n", "a: !list@n [1]\n",
             "a: !tuple [1]\n", "a: {x: 1}\n", "a: !dlist {x: 1}\n", "a: {y: 1}\n", "a: !call:m:f 1\n", "a: !call:m:g 1\n",
             "a: !factory:m:f 1\n", "a: !call:m:f {x: 1}\n", "a: !call:m:f {latent_args: {x: 1}}\n", "a: !var x\n",
             "a: !var {name: x, default: ~}\n", "a: !env x\n", "a: !calc x\n", "a: 1\nb: 2\n", "b: 2\na: 1\n",
             "a: 1\n.b: 2\n", "a: .nan\n"]  # fmt: skip
    for number, one in enumerate(texts):
        for other_number, other in enumerate(texts):
            assert (number == other_number) is same_graph(graph_of(one), graph_of(other)), (one, other)
