"""The traces of the pipeline from which other pipelines are drawn: two ranks with two stages each.

`trace_ranks` shortens the model to `FAMILY_DEPTH` blocks, which `FAMILY_CUTS` divide into the first and the last stage,
and two between them, with one and with three blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from forgather.errors import ForgatherError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.pass_shape import DEPTH, IrregularPassError, TooFewBlocksError, added
from forgather.ml.planner.rank_recorder import TEMPORARIES
from forgather.ml.planner.rank_trace import MakeTrainer, trace_rank
from forgather.ml.planner.stage_metadata import Relay
from forgather.ml.planner.stage_passes import StagePass, noting_passes
from forgather.ml.planner.trace_result import RankTrace

FAMILY_DEPTH = 3 * DEPTH + 1
"""The number of blocks of the models that are traced."""
_FEW = f"the model has fewer than {FAMILY_DEPTH} blocks"
FAMILY_CUTS = {"layer.2": "end", "layer.3": "end", "layer.6": "end"}
"""Their cuts, as a `split_spec`."""
FAMILY_PARTS = 3
"""The number of their micro-batches: the first one casts weights, only the last one may have rows with padding."""


@dataclass(frozen=True, kw_only=True)
class TracedRank:
    """The trace of a rank.

    Args:
        trace: the trace.
        passes: its passes.
    """

    trace: RankTrace
    passes: Sequence[StagePass]

    def held(self, category: str) -> int:
        """Returns the bytes of a category that existed before the step."""
        return sum(one.num_bytes for one in self.trace.allocations if not one.born and one.category == category)

    @cached_property
    def prologue(self) -> dict[str, int]:
        """What the step holds when the first pass begins, besides what existed before the step."""
        begin, found = min(one.begins for one in self.passes), dict[str, int]()
        for one in self.trace.allocations:
            if 0 < one.born <= begin and (one.died is None or one.died > begin):
                found = added(found, {one.category or TEMPORARIES: one.num_bytes})
        return found


@contextlib.contextmanager
def _refusing_few_blocks() -> Iterator[None]:
    """Context manager in which a cut at a block that the model does not have says that it has too few blocks."""
    try:
        yield
    except ForgatherError as error:
        if error.code != "FG752":
            raise
        # The user did not write these cuts.
        raise TooFewBlocksError(_FEW) from error


def trace_ranks(make_trainer: MakeTrainer, *, device_type: str) -> tuple[list[TracedRank], Any]:
    """Returns the traces of both ranks, and the trainer.

    Args:
        make_trainer: a function that makes the trainer, see `trace_shapes`: with two ranks, two stages on each,
            `FAMILY_CUTS` and `FAMILY_PARTS` micro-batches.
        device_type: the kind of device, "cpu" or "cuda".

    Raises:
        IrregularPassError: if the blocks of the model differ, or are too few.
    """
    relay, traced = Relay(), []
    made: list[Any] = []

    def make(hook: Any) -> Any:
        made.append(make_trainer(hook))
        return made[-1]

    for rank in range(2):
        facts = ProcessFacts(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
        with noting_passes() as passes, _refusing_few_blocks():
            trace = trace_rank(make, facts, depth=FAMILY_DEPTH, relay=relay, device_type=device_type, cuts_depth=True)
        if trace.whole is None:
            raise IrregularPassError("its blocks differ, or are few")
        if trace.whole < FAMILY_DEPTH:
            raise TooFewBlocksError(_FEW)
        traced.append(TracedRank(trace=trace, passes=tuple(passes)))
    return traced, made[0]
