"""The passes of pipeline stages by name, and what is known about each: its effect, its work, and sizes of stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from forgather.ml.planner.pass_shape import Span
from forgather.planner.work import Message, Operation

FIRST, MIDDLE, LAST, ALONE = "first", "middle", "last", "alone"
"""The places of a stage; `ALONE` is a stage between others with one block."""


class Effect(NamedTuple):
    """The effect of a pass, and the bytes that it passes on to other stages, by category."""

    span: Span
    passed_on: Mapping[str, int]


class PassWork(NamedTuple):
    """The work of a pass."""

    operations: Mapping[Operation, float]
    messages: Mapping[Message, float]


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """The bytes of the parts of a model: before the blocks, of one block, and after the blocks."""

    before: int
    block: int
    after: int

    def of(self, place: str, num_blocks: int) -> int:
        """Returns the bytes of a stage."""
        ends = {FIRST: self.before, LAST: self.after}.get(place, 0)
        return ends + num_blocks * self.block


class Turn(Enum):
    """Which of the micro-batches of a run of the schedule a pass is for."""

    FIRST, LATER, LAST = range(3)


class Adds(Enum):
    """The gradients that exist before a pass that would make them: none, those of tied weights, or all."""

    NOTHING, TIED, ALL = range(3)


class Variant(NamedTuple):
    """A pass of a stage.

    Args:
        place: `FIRST`, `MIDDLE` or `LAST`.
        kind: F, B, I or W.
        turn: which of the micro-batches it is for.
        waits: see `output_waits` of `shapes_of`.
        adds: to which gradients it adds.
    """

    place: str
    kind: str
    turn: Turn
    waits: bool = False
    adds: Adds = Adds.NOTHING


@dataclass(frozen=True, kw_only=True)
class TiedSizes:
    """The bytes of tied weights: of the weights, of those that are trained, and of their optimizer state.

    Args:
        weights: the bytes of all.
        trained: the bytes of those that are trained.
        optimizer: the bytes of their optimizer state.
        sizes: the bytes of each.
    """

    weights: int
    trained: int
    optimizer: int
    sizes: frozenset[int]
