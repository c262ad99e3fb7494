"""What the trace of one rank gives: peaks, allocations, work, and sizes of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from forgather.ml.planner.allocations import HOST, STEP_PHASES, Allocation, Region
from forgather.ml.planner.peaks import Peak, Timeline
from forgather.ml.planner.rank_recorder import BATCH, TEMPORARIES
from forgather.ml.planner.trace_facts import TraceFacts
from forgather.planner.work import Message, Operation


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What a rank holds in a training step and an evaluation.

    Args:
        num_blocks: the number of repeated blocks of the model on this rank.
        peaks: the peak of each region of the step.
        allocations: the allocations of the step, in the order of their birth.
        facts: the sizes of the run.
        operations: the number of operators that do the same work, in one step with all its micro-batches, and in one
            evaluation.
        messages: the number of equal messages to other ranks, in the same.
        block_operations: the same operators in a pipeline, by the index of the block; empty without a pipeline.
        repeated: the operations and messages of one micro-batch that is not the last one; empty if there is only one.
        whole: the number of blocks before the model was shortened; None if it was not.
        offloaded: what the trace would be if parts of the state were offloaded, by these parts; see `offload.py`.
        keeping: the trace of the same run without recomputation, where it was asked for.
    """

    num_blocks: int
    peaks: Mapping[Region, Peak]
    allocations: tuple[Allocation, ...]
    facts: TraceFacts
    operations: Mapping[Operation, float]
    messages: Mapping[Message, float]
    block_operations: Mapping[tuple[int, Operation], float] = field(default_factory=dict)
    repeated: Mapping[Operation | Message, int] = field(default_factory=dict)
    whole: int | None = None
    offloaded: Mapping[tuple[str, ...], RankTrace] = field(default_factory=dict)
    keeping: RankTrace | None = None

    @cached_property
    def in_order(self) -> list[Allocation]:
        """The allocations in the order of their birth; what existed before by its death and its use."""
        return sorted(
            self.allocations, key=lambda item: (item.born, item.died or math.inf, item.category or "", item.num_bytes)
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The births and deaths of the allocations, which are `in_order`."""
        return Timeline(self.in_order, lambda item: item.category or TEMPORARIES)

    def runs_program_of(self, other: RankTrace) -> bool:
        """Returns whether the same operators ran as in another trace, so that each allocation has a counterpart.

        Args:
            other: the other trace.
        """
        return self._program == other._program

    @cached_property
    def _program(self) -> list[tuple[Any, ...]]:
        return [(item.born, item.died, item.region, item.operation, item.category) for item in self.in_order]

    @property
    def peak(self) -> tuple[Region, Peak]:
        """The region of the largest sum of bytes of a device, and its peak."""
        return max((item for item in self.peaks.items() if item[0].phase != HOST), key=lambda item: item[1].num_bytes)

    def of_model_with(self, whole: int | None) -> RankTrace:
        """Returns the trace with the number of blocks before the model was shortened; None if it was not."""
        offloaded = {parts: one.of_model_with(whole) for parts, one in self.offloaded.items()}
        keeping = None if self.keeping is None else self.keeping.of_model_with(whole)
        return replace(self, whole=whole, offloaded=offloaded, keeping=keeping)

    def with_evaluation_of(self, other: RankTrace) -> RankTrace:
        """Returns the trace with the evaluation and the answers of another one, which differ in the rows that wait."""
        if self is other:
            return self
        more = self._bytes_of(BATCH) - other._bytes_of(BATCH)
        later: dict[Region, Peak] = {
            at: replace(
                peak,
                num_bytes=peak.num_bytes + more,
                categories={**peak.categories, BATCH: peak.categories.get(BATCH, 0) + more},
                course=(),
            )
            for at, peak in other.peaks.items()
            if at.phase not in STEP_PHASES
        }

        def joined(kind: str) -> dict[Any, float]:
            return {
                **getattr(self, kind),
                **{key: count for key, count in getattr(other, kind).items() if key.phase == "evaluation"},
            }

        return replace(
            self,
            peaks={**self.peaks, **later},
            operations=joined("operations"),
            messages=joined("messages"),
            offloaded={parts: one.with_evaluation_of(other.offloaded[parts]) for parts, one in self.offloaded.items()},
        )

    def _bytes_of(self, category: str) -> int:
        return sum(item.num_bytes for item in self.allocations if item.category == category)
