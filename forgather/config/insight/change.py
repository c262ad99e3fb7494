"""One difference of two graphs.

Takes nothing; `diff` makes these, and comparisons of runs add what only they know.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forgather.config.graph import Node
from forgather.config.path import GraphPath
from forgather.source import Origin


class Change(StrEnum):
    """What differs at a path."""

    ADDED = "added"
    REMOVED = "removed"
    VALUE = "value"
    CONSTRUCTOR = "constructor"
    KIND = "kind"
    NAME = "name"
    ORDER = "order"
    SHARED = "shared"
    APART = "apart"
    DEFAULT = "default"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference.

    Args:
        text: the value as YAML on one line; "" where there is none.
        origin: the line that causes it; for a value that is not there, the line that removed it, where that is known.
        path: where it is in the graph of this side.
        node: the value; None where there is none.
    """

    text: str
    origin: Origin | None
    path: GraphPath
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Args:
        change: what differs.
        old: the side of the first graph.
        new: the side of the second graph.
        also: further paths of the same value in the second graph, at most ten.
        partner: for `SHARED` and `APART`, the path of the value that it is, or was, one object with.
    """

    change: Change
    old: Side
    new: Side
    also: tuple[GraphPath, ...] = ()
    partner: GraphPath | None = None

    @property
    def path(self) -> GraphPath:
        """Where it is in the second graph, or where it was in the first."""
        return self.old.path if self.change is Change.REMOVED else self.new.path
