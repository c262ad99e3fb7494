"""`!var pp_config`: the text of the config, for what outlives its project.

Takes a graph and its text, gives the graph in which that variable has the text as its default. Keeps true: a graph that
does not use the variable is given back as it is, and what is shared stays shared.
"""

from __future__ import annotations

from dataclasses import replace

from forgather.config.graph import Graph, Node, Scalar, Var
from forgather.config.traverse import all_nodes, rebuild, with_value

RENDERED = "pp_config"
"""The construction variable that every construction of a config has: its rendered text."""


def reads_rendered(graph: Graph) -> bool:
    """Returns whether a graph uses the text of its config."""
    return any(isinstance(node, Var) and node.variable == RENDERED for _, node in all_nodes(graph))


def with_rendered(graph: Graph, text: str) -> Graph:
    """Returns a graph that can be built without its project: code and records of runs have no text to give."""
    if not reads_rendered(graph):
        return graph
    made: dict[int, Node] = {}

    def change(node: Node) -> Node:
        if id(node) not in made:
            is_text = isinstance(node, Var) and node.variable == RENDERED
            given = Scalar(origin=node.origin, value=text)
            made[id(node)] = replace(node, default=given) if is_text else rebuild(node, change)  # type: ignore[call-arg]
        return made[id(node)]

    return replace(
        graph,
        targets={name: with_value(entry, change(entry.value)) for name, entry in graph.targets.items()},
        definitions=tuple(with_value(entry, change(entry.value)) for entry in graph.definitions),
        kept=tuple(map(change, graph.kept)),
        anchors={id(made[key]) if key in made else key: name for key, name in graph.anchors.items()},
    )
