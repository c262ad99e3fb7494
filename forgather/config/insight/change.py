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

    SHARED: the values at two paths have become one object. APART: one object at two paths has become two objects.
    Every other kind names the part that differs.
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
        text: the value as YAML on one line; "" if this side has no value.
        origin: the line that wrote the value; for a missing value, the line that removed it, if that line is known.
        path: the path of the value in the graph of this side.
        node: the node of the value; None if this side has no value.
    """

    text: str
    origin: Origin | None
    path: GraphPath
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two graphs.

    Args:
        change: the kind of the difference.
        old: the side of the first graph.
        new: the side of the second graph.
        also: the further paths of the same value in the second graph, at most ten.
        partner: the path of the value that has become one object with this value (`SHARED`), or that no longer is
            (`APART`); None for other kinds.
    """

    change: Change
    old: Side
    new: Side
    also: tuple[GraphPath, ...] = ()
    partner: GraphPath | None = None

    @property
    def path(self) -> GraphPath:
        """The path of the difference in the second graph; for a removed value, the path in the first graph."""
        return self.old.path if self.change is Change.REMOVED else self.new.path
