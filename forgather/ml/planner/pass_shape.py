"""The effect of a pass of a pipeline stage on memory, for a stage with any number of blocks.

`shapes_of` takes the trace of a rank and its passes, and gives a `PassShape` for each pass: what runs outside of the
blocks, and sweeps over the blocks. Blocks are alike, so that a stage of n blocks does what the first and the last block
of a stage of three blocks do, and n - 2 times what the block between them does.

Units:
    bytes, relative to those at the beginning of the pass.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from forgather.ml.planner.allocations import Allocation
from forgather.ml.planner.rank_recorder import TEMPORARIES
from forgather.ml.planner.stage_passes import StagePass
from forgather.planner.memory_plan import GRADIENTS

DEPTH = 3
"""The number of blocks of a stage whose passes can be drawn for other numbers."""


@dataclass(frozen=True)
class Span:
    """What a part of a pass does to memory.

    Args:
        change: the change from its beginning to its end, by category.
        peak: the change until the moment of the largest sum, by category.
        made_by: the allocation that made the sum so large.
    """

    change: Mapping[str, int] = field(default_factory=dict)
    peak: Mapping[str, int] = field(default_factory=dict)
    made_by: str = ""

    @cached_property
    def change_bytes(self) -> int:
        """The sum of the change."""
        return sum(self.change.values())

    @cached_property
    def peak_bytes(self) -> int:
        """The sum of the peak."""
        return sum(self.peak.values())

    def then(self, later: Span) -> Span:
        """Returns the effect of this part and then of another one."""
        change = added(self.change, later.change)
        if later.made_by and self.change_bytes + later.peak_bytes > (self.peak_bytes if self.made_by else -1):
            return Span(change, added(self.change, later.peak), later.made_by)
        return Span(change, self.peak, self.made_by)


class PassShape(NamedTuple):
    """The parts of a pass in their order.

    Args:
        parts: a `_Segment` for what runs outside of the blocks, and a tuple of them for a sweep over all blocks.
        passed_on: the bytes that other stages get and that no pass of the same micro-batch frees, by category.
    """

    parts: tuple[_Segment | tuple[_Segment, ...], ...]
    passed_on: Mapping[str, int]

    def of(self, num_blocks: int, alone: PassShape) -> Span:
        """Returns the effect of the pass of a stage with another number of blocks.

        Args:
            num_blocks: the number of blocks, at least 1.
            alone: the same pass of a stage with one block, whose only block is both the first and the last one.
        """
        # Several sweeps over one block are one.
        only = [segment for part in alone.parts if isinstance(part, tuple) for segment in part]
        whole = Span()
        for part in self.parts:
            if isinstance(part, _Segment) or self is alone:
                segments = [part] if isinstance(part, _Segment) else [*part]
            elif num_blocks > 1:
                segments = [part[0], *part[1:2] * (num_blocks - 2), part[-1]]
            else:
                segments, only = only, []
            spans = {id(segment): segment.span(num_blocks - 2) for segment in segments}
            for segment in segments:
                whole = whole.then(spans[id(segment)])
        return whole


class _Change(NamedTuple):
    num_bytes: int
    category: str
    made_by: str
    is_repeated: bool


class _Segment:
    """A part of a pass, and its changes in their order. Those that are repeated are made once for each inner block."""

    def __init__(self, changes: Sequence[_Change]) -> None:
        self._changes = changes

    def span(self, num_inner: int) -> Span:
        """Returns the effect, for a stage with a number of blocks between the first and the last one."""
        change: dict[str, int] = {}
        peak, most, made_by, total = {}, 0, "", 0
        for one in self._changes:
            num_bytes = one.num_bytes * max(0, num_inner) if one.is_repeated else one.num_bytes
            change[one.category] = change.get(one.category, 0) + num_bytes
            total += num_bytes
            if one.num_bytes > 0 and (not made_by or total > most):
                peak, most, made_by = dict(change), total, one.made_by
        return Span(change, peak, made_by)


class IrregularPassError(Exception):
    """Other stages do not follow from those that are traced. The message says why, as a part of a sentence."""


class TooFewBlocksError(IrregularPassError):
    """The model, or one of its stages, has fewer blocks than stages must have to follow from others."""


class _Event(NamedTuple):
    time: int
    num_bytes: int
    allocation: Allocation


def shapes_of(
    allocations: Iterable[Allocation],
    passes: Sequence[StagePass],
    blocks: Mapping[int, range],
    *,
    output_waits: bool = False,
    adds: Callable[[Allocation], bool] = lambda _: False,
) -> dict[tuple[int, str, int], PassShape]:
    """Returns the shape of each pass, by stage, kind and micro-batch.

    Args:
        allocations: the allocations of the step.
        passes: the passes of the step.
        blocks: for each stage, the indices of its blocks among those of the rank.
        output_waits: whether the output of the last stage is kept until its next forward pass has computed another
            one, as a local variable of torch's schedules with one stage does, and not only until its backward pass.
        adds: a function that returns whether a new gradient is added to one that exists before, and freed.

    Raises:
        IrregularPassError: if a pass does not go through the blocks of its stage one after the other.
    """
    ordered = sorted(passes, key=lambda one: one.begins)
    begins = [one.begins for one in ordered]
    ends = [*begins[1:], ordered[-1].computed]
    events: list[list[_Event]] = [[] for _ in ordered]
    passed_on: list[dict[str, int]] = [{} for _ in ordered]

    def pass_at(time: int | None) -> int | None:
        found = None if time is None else bisect.bisect_left(begins, time) - 1
        return found if found is not None and found >= 0 and time is not None and time <= ends[found] else None

    for item in allocations:
        born, died = pass_at(item.born) if item.born else None, pass_at(item.died)
        if born is None:
            continue
        maker = ordered[born]
        events[born].append(_Event(item.born, item.num_bytes, item))
        is_own = died is not None and _work_of(ordered[died]) == _work_of(maker)
        if item.born in maker.passed_on and not is_own:
            passed_on[born] = added(passed_on[born], {_category(item): item.num_bytes})
        elif item.born in maker.passed_on and output_waits:
            later = [index for index, one in enumerate(ordered) if (one.stage, one.kind) == (maker.stage, "F")]
            following = next((index for index in later if index > born), None)
            if following is not None:
                events[following].append(_Event(ordered[following].computed, -item.num_bytes, item))
        elif item.category == GRADIENTS and adds(item):
            events[born].append(_Event(item.born, -item.num_bytes, item))
        elif is_own and died is not None and item.died is not None:
            events[died].append(_Event(item.died, -item.num_bytes, item))
    return {
        (one.stage, one.kind, one.micro_batch): PassShape(_parts(found, blocks[one.stage], one), given)
        for one, found, given in zip(ordered, events, passed_on, strict=True)
    }


def _work_of(one: StagePass) -> tuple[int, int]:
    return one.stage, one.micro_batch


def _category(item: Allocation) -> str:
    return item.category or TEMPORARIES


def _parts(events: Iterable[_Event], blocks: range, noted: StagePass) -> tuple[_Segment | tuple[_Segment, ...], ...]:
    runs: list[tuple[int | None, list[_Event]]] = []
    for event in sorted(events, key=lambda one: one.time):
        place = event.allocation.region.block
        # Before a stage enters a block, the place is still that of the block that ran last.
        label = place - blocks.start if place in blocks and event.time > noted.entered else None
        if not runs or (event.num_bytes > 0 and label != runs[-1][0]):
            # What is freed belongs to the part that frees it.
            runs.append((label if event.num_bytes > 0 else None, []))
        runs[-1][1].append(event)
    # A backward pass of weights frees what all blocks have kept where torch leaves it, and not block by block.
    # That of the first stage is a whole backward pass, because its inputs have no gradients.
    inner = 1 if noted.kind == "W" and noted.stage > 0 and len(blocks) == DEPTH else None
    parts: list[_Segment | tuple[_Segment, ...]] = []
    position, is_outside = 0, False
    while position < len(runs):
        label = runs[position][0]
        if label is None:
            parts.append(_segment(runs[position][1], blocks, inner, None))
            position += 1
            continue
        sweep = runs[position : position + len(blocks)]
        order = [one for one, _ in sweep]
        if order not in ([*range(len(blocks))], [*reversed(range(len(blocks)))]):
            if label not in (0, len(blocks) - 1) or is_outside:
                raise IrregularPassError("its passes do not go through the blocks one after the other")
            # What comes before or after the blocks, such as the gradient of an embedding, may bear the name of an end.
            parts.append(_segment(runs[position][1], blocks, inner, None))
            position, is_outside = position + 1, True
            continue
        is_outside = False
        parts.append(tuple(_segment(found, blocks, None if own == 1 else inner, order[0]) for own, found in sweep))
        position += len(blocks)
    return tuple(parts)


def _segment(events: Sequence[_Event], blocks: range, inner: int | None, first: int | None) -> _Segment:
    """Returns a part of a pass.

    Args:
        events: its events in their order.
        blocks: the blocks of the stage.
        inner: the number of the block between the first and the last one, if others like it change something here.
        first: the number of the block that the sweep begins with; None outside of sweeps.
    """

    def maker(event: _Event) -> int:
        return event.allocation.region.block - blocks.start

    def form(event: _Event) -> tuple[str, tuple[int, ...], int]:
        return event.allocation.operation, event.allocation.shape, event.num_bytes

    # What is freed of the first block as well is freed of all blocks, and not only of the one that ran before.
    of_first = {form(event) for event in events if event.num_bytes < 0 and maker(event) == first}
    return _Segment(
        [
            _Change(
                event.num_bytes,
                _category(event.allocation),
                str(event.allocation),
                event.num_bytes < 0 and maker(event) == inner and (first is None or form(event) in of_first),
            )
            for event in events
        ]
    )


def added(one: Mapping[str, int], other: Mapping[str, int], times: int = 1) -> dict[str, int]:
    """Returns the sums of two mappings of bytes, the second one counted several times."""
    found = dict(one)
    for name, size in other.items():
        found[name] = found.get(name, 0) + size * times
    return found
