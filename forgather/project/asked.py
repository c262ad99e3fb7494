"""How many processes a config asks for by the sizes of its trainer's arguments.

Takes a graph; gives a number, or None where no size says. Keeps true: only what is written out counts, and what a
setting that is left out comes to.
"""

from __future__ import annotations

from typing import Any

from forgather.conditions import UNKNOWN
from forgather.config.graph import Call, Graph, Mapped, Node, Scalar
from forgather.project.settings import shipped_rules


def processes_asked_for(graph: Graph) -> int | None:
    """Returns the number of processes that the arguments of `main` multiply to."""
    main = graph.targets.get("main")
    arguments = _keyword(main.value, "args") if main else None
    rules = shipped_rules().get(arguments.constructor, ()) if isinstance(arguments, Call) else ()
    for known in rules:
        if "layout" in known.computed and isinstance(arguments, Call):
            written = {str(entry.key): _plain(entry.value) for entry in arguments.kwargs}
            asked = known.complete(written)["processes"]
            return asked if isinstance(asked, int) else None
    return None


def _keyword(node: Node, name: str) -> Node | None:
    entries = node.kwargs if isinstance(node, Call) else ()
    return next((entry.value for entry in entries if entry.key == name), None)


def _plain(node: Node) -> Any:
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Mapped):
        return {entry.key: _plain(entry.value) for entry in node.entries}
    return UNKNOWN
