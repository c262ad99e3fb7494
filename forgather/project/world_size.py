"""The number of processes that a config requests, computed from the parallel sizes in its trainer's arguments.

The input is a graph; the output is a number, or None if no size determines it. Only plain values and defaults are used.
"""

from __future__ import annotations

from typing import Any

from forgather.config.graph import Graph, Mapped, Node, Scalar
from forgather.project.constructor_rules import rules_of
from forgather.project.targets import run_meta
from forgather.project.trainer_arguments import trainer_arguments
from forgather.rule_conditions import UNKNOWN


def processes_per_machine(graph: Graph) -> int | str:
    """Returns the number of processes on one machine that a config requests; "auto" stands for an unknown number.

    If the config requests "auto", the parallel sizes in the trainer's arguments determine the number. The result "gpu"
    means one process for each accelerator.

    Raises:
        ProjectError: FG411 or FG828 if the target `meta` has a wrong value.
    """
    wished = run_meta(graph).nproc_per_node
    return processes_from_sizes(graph) or wished if wished == "auto" else wished


def processes_from_sizes(graph: Graph) -> int | None:
    """Returns the number of processes that the sizes in the arguments of `main` require; None if it is unknown."""
    arguments = trainer_arguments(graph)
    if arguments is None:
        return None
    for known in rules_of(arguments.call.constructor):
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
