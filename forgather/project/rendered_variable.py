"""`!var pp_config`: the rendered text of the config as a construction variable.

The input is a graph and its rendered text; the output is a graph in which the variable has the text as its default. A
graph that does not use the variable is returned unchanged. A node that is used several times is still one node in the
result.
"""

from __future__ import annotations

from dataclasses import replace

from forgather.config.graph import Graph, Node, Scalar, Var
from forgather.config.traverse import all_nodes, replace_nodes

RENDERED = "pp_config"
"""The construction variable whose value is the rendered text of the config; every construction of a config sets it."""


def reads_rendered(graph: Graph) -> bool:
    """Returns whether a graph uses the rendered text of its config."""
    return any(isinstance(node, Var) and node.variable == RENDERED for _, node in all_nodes(graph))


def with_rendered(graph: Graph, text: str) -> Graph:
    """Returns a graph that contains the rendered text, so that generated code and repeated runs need no templates.

    Args:
        graph: the graph.
        text: the rendered text of the config.
    """
    if not reads_rendered(graph):
        return graph

    def with_text(node: Node) -> Node:
        if isinstance(node, Var) and node.variable == RENDERED:
            return replace(node, default=Scalar(origin=node.origin, value=text))
        return node

    return replace_nodes(graph, with_text)
