"""The record of one difference between two graphs.

`diff` makes these records; comparisons of runs add further ones, such as a difference in code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forgather.config.graph import Node
from forgather.config.path import GraphPath
from forgather.source import Origin


class Change(StrEnum):
    """The kind of a difference at a path.

    SHARED: two paths became one object. APART: one object became two. The others name the part that differs.
    """

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
        text: the value as YAML on one line; "" if there is none.
        origin: the line that wrote the value; for a missing value, the line that removed it, if that is known.
        path: its path in the graph of this side.
        node: the value; None if there is none.
    """

    text: str
    origin: Origin | None
    path: GraphPath
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Args:
        change: the kind of the difference.
        old: the side of the first graph.
        new: the side of the second graph.
        also: further paths of the same value in the second graph, at most ten.
        partner: for `SHARED` and `APART`, the path of the other value, with which it is or was one object.
    """

    change: Change
    old: Side
    new: Side
    also: tuple[GraphPath, ...] = ()
    partner: GraphPath | None = None

    @property
    def path(self) -> GraphPath:
        """The path in the second graph; for a removed value, the path in the first."""
        return self.old.path if self.change is Change.REMOVED else self.new.path
