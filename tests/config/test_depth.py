"""What may be loaded can also be built, shown and written: the deepest graph fits on the stack."""

import json

import pytest
from documents import graph_of

from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.equality import same_graph
from forgather.config.graph import Graph
from forgather.config.insight.show import to_json, tree
from forgather.config.lint.graph_check import check_graph
from forgather.config.materialize import materialize
from forgather.config.override import override

DEPTH = 98


def nested(opening: str, closing: str) -> Graph:
    return graph_of(f"a: {opening * DEPTH}1{closing * DEPTH}\n")


GRAPHS = {
    "sequences": nested("[", "]"),
    "mappings": nested("{a: ", "}"),
    "calls": nested("!singleton:dict {a: ", "}"),
    "tuples": nested("!tuple [", "]"),
    "partials": nested("!partial:dict {a: ", "}"),
    "factories in a partial": graph_of(f"a: !partial:dict {{a: {'!factory:dict {a: ' * (DEPTH - 1)}1{'}' * DEPTH}\n"),
    "variables": nested("!var {name: x, default: ", "}"),
    "explicit calls": graph_of(f"a: {'!call:dict {args: [], kwargs: {b: ' * (DEPTH // 2)}1{'}}' * (DEPTH // 2)}\n"),
    "latent": graph_of(f"a: {'!call:dict {latent_args: {b: ' * (DEPTH // 2)}1{'}}' * (DEPTH // 2)}\n"),
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
def test_the_deepest_graph_goes_through_every_stage(graph):
    built = materialize(graph)["a"]
    if callable(built):
        built()
    assert tree(graph).startswith("a: ")
    json.dumps(to_json(graph))
    assert [] == check_graph(graph)
    assert same_graph(graph, graph_of(emit_yaml(graph)))
    assert ["a"] == list(override(graph, [("a", "1")]).targets)
