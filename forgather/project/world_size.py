"""The number of processes that a config asks for, from the sizes in its trainer's arguments.

Takes a graph; gives a number, or None if no size determines it. Only plain values and defaults count.
"""

from __future__ import annotations

from typing import Any

from forgather.config.graph import Graph, Mapped, Node, Scalar
from forgather.project.targets import run_meta
from forgather.project.trainer_arguments import trainer_arguments
from forgather.rule_conditions import UNKNOWN
from forgather.rules import shipped_rules


def processes_per_machine(graph: Graph) -> int | str:
    """Returns the number of processes on one machine that a config asks for; for "auto" the sizes of the arguments
    decide.

    Raises:
        ProjectError: FG411, FG828, the target `meta` has a wrong value.
    """
    wished = run_meta(graph).nproc_per_node
    return processes_from_sizes(graph) or wished if wished == "auto" else wished


def processes_from_sizes(graph: Graph) -> int | None:
    """Returns the product of the sizes in the arguments of `main`, which is the number of processes; None if it is
    open.
    """
    arguments = trainer_arguments(graph)
    if arguments is None:
        return None
    for known in shipped_rules().get(arguments.call.constructor, ()):
        if "layout" in known.computed:
            written = {str(entry.key): _plain_value(entry.value) for entry in arguments.call.kwargs}
            asked = known.complete(written)["processes"]
            return asked if isinstance(asked, int) else None
    return None


def _plain_value(node: Node) -> Any:
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Mapped):
        return {entry.key: _plain_value(entry.value) for entry in node.entries}
    return UNKNOWN
