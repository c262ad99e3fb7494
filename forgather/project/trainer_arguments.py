"""The arguments that `main` is called with: the call in which a trainer has its settings.

Takes a graph; gives what stands in that call, and what `--set` calls a setting of it. Keeps true: only a call that is
written as such counts, since what anything else comes to is known by constructing it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from forgather.config.graph import Call, Entry, Graph, Node, Scalar
from forgather.config.insight.path_lookup import path_text
from forgather.config.traverse import places


@dataclass(frozen=True, slots=True)
class TrainerArguments:
    """The arguments of a trainer.

    Args:
        graph: of the config.
        call: what makes them.
    """

    graph: Graph
    call: Call

    def get(self, name: str) -> Node | None:
        """Returns a setting; None where it is left out."""
        return _keyword(self.call, name)

    def entry(self, name: str) -> Entry | None:
        """Returns a setting with the place where it is written; None where it is left out."""
        return next((entry for entry in self.call.kwargs if entry.key == name), None)

    def plain(self, name: str) -> object:
        """Returns the value of a setting; None where it is left out, or no plain value."""
        node = self.get(name)
        return node.value if isinstance(node, Scalar) else None

    def path(self, name: str) -> str:
        """Returns what `--set` calls a setting, there or not."""
        path = next(path_text(place) for place, node in places(self.graph) if node is self.call)
        return f"{'' if self.get(name) else '+'}{path}.{name}"


def trainer_arguments(graph: Graph) -> TrainerArguments | None:
    """Returns the arguments of `main`; None where it is called without any."""
    main = graph.targets.get("main")
    call = _given(main.value) if main else None
    return TrainerArguments(graph, call) if isinstance(call, Call) else None


def _given(main: Node) -> Node | None:
    # Every trainer has the model first, and its arguments second.
    by_place = main.args[1] if isinstance(main, Call) and len(main.args) > 1 else None
    return _keyword(main, "args") or by_place


def _keyword(node: Node, name: str) -> Node | None:
    entries = node.kwargs if isinstance(node, Call) else ()
    return next((entry.value for entry in entries if entry.key == name), None)
