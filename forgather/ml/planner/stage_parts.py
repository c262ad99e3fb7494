"""The parts of a model that is cut into pipeline stages: the cuts, and what is known about each part without a trace.

`parts_of` takes a built strategy, and gives the `StageParts` that its traces carry.

Units:
    bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forgather.ml.strategy.pipeline.schedules import Placement
from forgather.ml.strategy.pipeline.split import SplitPlan, part_bytes, unit_costs
from forgather.planner.stage_cuts import UnitCosts


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """The cuts of a traced pipeline, and what is known about its parts without a trace.

    Args:
        plan: the cuts.
        placement: the ranks of the stages.
        shares: the cost of each part as a share of the whole, see `unit_costs`.
        weights: the bytes of the weights of each part.
        trained: the bytes of those that are trained.
    """

    plan: SplitPlan
    placement: Placement
    shares: UnitCosts
    weights: UnitCosts
    trained: UnitCosts

    def part_of(self, rank: int, block: int) -> int | None:
        """Returns the part that a block index of a trace means: 0 before the blocks, and one more than each block.

        It is None for what a stage does outside of its blocks without having an end of the model: it does the same with
        any other blocks.

        Args:
            rank: the rank of the pipeline.
            block: the index among the blocks of the rank; -1 before the first one, their number after the last one.
        """
        stages = self.placement.stages_of(rank)
        blocks = [index for stage in stages for index in self.plan.span(stage)]
        if block < 0:
            return 0 if 0 in stages else None
        if block < len(blocks):
            return blocks[block] + 1
        return len(self.plan.blocks) + 1 if self.plan.num_stages - 1 in stages else None


def parts_of(strategy: Any) -> StageParts | None:
    """Returns the parts of a built strategy; None if it is not a pipeline."""
    plan = getattr(strategy, "plan", None)
    if not isinstance(plan, SplitPlan):
        return None
    return StageParts(
        plan=plan,
        placement=strategy.placement,
        shares=unit_costs(strategy.model, plan.blocks),
        weights=part_bytes(strategy.model, plan.blocks),
        trained=part_bytes(strategy.model, plan.blocks, trained_only=True),
    )
