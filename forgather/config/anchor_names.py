"""Anchor names for shared nodes.

The input is a graph; the output is a name for each container or call that several paths reach. Invariants: names are
unique and valid in YAML; a name that the user chose is kept if it is unique and valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from forgather.config.graph import Graph, Node, Scalar
from forgather.config.path import GraphPath, Key
from forgather.config.traverse import shared_nodes, walk

_UNREADABLE = re.compile(r"[^A-Za-z0-9_-]+")


def anchor_names(graph: Graph, tops: Iterable[tuple[GraphPath, Node]]) -> dict[int, str]:
    """Returns the anchor name of each shared node, by `id(node)`.

    A node is shared if several paths reach it and it is not a plain scalar.

    Args:
        graph: the graph, which contains the names that the user chose.
        tops: the paths and nodes that will be printed.
    """
    tops = list(tops)
    shared = shared_nodes([node for _, node in tops])
    names: dict[int, str] = {}
    taken: set[str] = set()
    for path, node in walk(tops):
        # Plain scalars are written at each occurrence: nobody can see whether two equal numbers are one object.
        if id(node) in shared and not isinstance(node, Scalar):
            name = _free(graph.anchors.get(id(node)) or node.name or _last_key(path), taken)
            taken.add(name)
            names[id(node)] = name
    return names


def _last_key(path: GraphPath) -> str:
    keys = [str(step.name) for step in path if isinstance(step, Key)]
    return keys[-1] if keys else "value"


def _free(wanted: str, taken: set[str]) -> str:
    # The name of a node or the last key may have characters that YAML does not allow in an anchor.
    base = _UNREADABLE.sub("_", wanted).strip("_") or "value"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name
