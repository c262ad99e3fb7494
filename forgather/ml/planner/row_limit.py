"""The largest number of rows of a micro-batch with which a rank stays below a limit of memory.

`largest_rows` traces a few numbers of rows, `row_line.py` computes the peak of any other one, and
`planner/batch_size.py` finds the largest that fits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.deep_trace import DepthTraces, depth_traces
from forgather.ml.planner.rank_trace import MakeTrainer
from forgather.ml.planner.row_line import peak_at
from forgather.ml.planner.transformers_steps import planned_trainer
from forgather.ml.planner.window_shape import WindowShape
from forgather.ml.trainer.trainer import Trainer
from forgather.planner.batch_size import largest_size


def largest_rows(
    make_trainer: MakeTrainer,
    *,
    world_size: int,
    local_world_size: int,
    limit: int,
    most: int,
    within_data: bool = False,
    device_type: str = "cpu",
) -> dict[str, Any]:
    """Returns the largest number of rows of a micro-batch that fits, see `LargestSize`, as plain data.

    `most_rows` is the number of rows for which the data suffices; None for a stream.

    Args:
        make_trainer: a function that returns the trainer of the config, see `trace_shapes`.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        limit: the limit of one rank in bytes.
        most: the largest number of rows to try.
        within_data: whether no more rows are tried than the data has.
        device_type: the kind of device, "cpu" or "cuda", see `trace_shapes`.

    Raises:
        PlanError: FG997 for a pipeline, whose stages are made for one number of rows, and for batches whose tensors
            have no common number of rows.
    """
    facts = ProcessFacts(
        rank=0,
        local_rank=0,
        world_size=world_size,
        local_world_size=min(local_world_size, world_size),
    )

    traces: dict[int, DepthTraces] = {}

    def measure(sizes: Sequence[int]) -> list[DepthTraces]:
        missing = [size for size in sizes if size not in traces]
        shapes = [WindowShape(rows=size) for size in missing]
        if shapes:
            make = functools.partial(without_pipeline, make_trainer, device_type)
            traces.update(zip(missing, depth_traces(make, facts, shapes, device_type=device_type), strict=True))
        return [traces[size] for size in sizes]

    most_rows = measure((1, 2))[0].shallow.facts.most_rows
    bound = min(most, most_rows) if within_data and most_rows else most
    return {**asdict(largest_size(measure, peak_at, limit, most=bound)), "most_rows": most_rows}


def without_pipeline(make_trainer: MakeTrainer, device_type: str, hook: Any) -> Trainer:
    """Returns the trainer whose strategy is traced.

    Args:
        make_trainer: a function that returns the trainer of the config, see `trace_shapes`.
        device_type: the kind of device that is planned for, "cpu" or "cuda".
        hook: the argument of `make_trainer`.

    Raises:
        PlanError: FG997 for a pipeline.
    """
    trainer = planned_trainer(make_trainer(hook), device_type)
    if trainer.strategy.layout.pipeline_parallel_size > 1:
        raise PlanError(
            "other sizes are not planned for a pipeline: its stages are made for one size",
            code="FG997",
            hint="plan the sizes one by one, with --set",
        )
    return trainer
