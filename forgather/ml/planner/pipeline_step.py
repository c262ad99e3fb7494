"""The time of one run of a pipeline's schedule, simulated action by action in torch's own order."""

from __future__ import annotations

from collections.abc import Sequence

from forgather.ml.strategy.pipeline.bubble_simulation import StageTimes, simulate
from forgather.pipeline_schedules import SCHEDULES


def schedule_seconds(
    schedule: str, stages: Sequence[tuple[float, float]], micro_batches: int, stages_per_rank: int, transfer: float
) -> float:
    """Returns the seconds from the first to the last action.

    Args:
        schedule: the name of the schedule.
        stages: for each stage, the seconds of the forward and of the backward pass of one micro-batch.
        micro_batches: the number of micro-batches.
        stages_per_rank: the number of stages on a rank.
        transfer: the seconds until the result of a stage is on another rank.
    """
    # Where a schedule computes the two kinds of gradients apart, each takes about half of the backward pass.
    times = [StageTimes(forward, backward / 2, backward / 2) for forward, backward in stages]
    if SCHEDULES[schedule].splits_backward:
        times[0] = times[0].as_first()
    return simulate(
        schedule,
        len(stages) // stages_per_rank,
        micro_batches,
        stages_per_rank=stages_per_rank,
        times=times,
        send_time=transfer,
    ).step_time
