"""The largest number of rows of a micro-batch with which a rank stays below a limit of memory.

`largest_rows` traces a few numbers of rows, and `planner/batch_size.py` does the arithmetic. The step runs the same
operators with every number of rows, so that each allocation has a counterpart in each trace, and its size is affine in
the number of rows. The peak is computed from these sizes, at each of the traced depths, before a deep model is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.allocations import Allocation, Peak, Region, peaks
from forgather.ml.planner.extrapolation import DEEPER, SHALLOW, extrapolated
from forgather.ml.planner.rank_trace import TEMPORARIES, MakeTrainer, RankTrace, trace_shapes
from forgather.ml.planner.window_shape import WindowShape
from forgather.planner.batch_size import largest_size


class _Depths(NamedTuple):
    """The traces of one number of rows: of the whole model, or of two shallow ones."""

    shallow: RankTrace
    deeper: RankTrace | None


def largest_rows(
    make_trainer: MakeTrainer,
    *,
    world_size: int,
    local_world_size: int,
    limit: int,
    most: int,
    device_type: str = "cpu",
) -> dict[str, Any]:
    """Returns the largest number of rows of a micro-batch that fits, see `LargestSize`, as plain data.

    Args:
        make_trainer: a function that returns the trainer of the config, see `trace_shapes`.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        limit: the limit of one rank in bytes.
        most: the largest number of rows to try.
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

    def without_pipeline(hook: Any) -> Any:
        """Returns the trainer, unless it is one of a pipeline."""
        trainer = make_trainer(hook)
        if trainer.strategy.layout.pipeline_parallel_size > 1:
            raise PlanError(
                "the largest batch of a pipeline is not searched for: its stages are made for one number of rows",
                code="FG997",
                hint="plan the sizes one by one, with --set trainer_args.per_device_train_batch_size=...",
            )
        return trainer

    def measure(sizes: Sequence[int]) -> list[_Depths]:
        shapes = [WindowShape(rows=size) for size in sizes]
        shallow = trace_shapes(without_pipeline, facts, shapes, depth=SHALLOW, device_type=device_type)
        if shallow[0].whole is None:
            return [_Depths(trace, None) for trace in shallow]
        deeper = trace_shapes(without_pipeline, facts, shapes, depth=DEEPER, device_type=device_type)
        return [_Depths(*pair) for pair in zip(shallow, deeper, strict=True)]

    return asdict(largest_size(measure, _predicted, limit, most=most))


def _predicted(points: Mapping[int, _Depths], size: int) -> int:
    """Returns the peak of a number of rows, in bytes, on the line through one or two traced numbers."""
    first = next(iter(points.values()))
    shallow = _peaks({rows: depths.shallow for rows, depths in points.items()}, size)
    if first.deeper is not None and first.shallow.whole is not None:
        deeper = _peaks({rows: depths.deeper for rows, depths in points.items() if depths.deeper is not None}, size)
        shallow = extrapolated(shallow, deeper, first.shallow.whole)
        untraced = first.shallow.facts.at_depth(first.deeper.facts, first.shallow.whole).untraced
    else:
        untraced = first.shallow.facts.untraced
    return max(peak.num_bytes for peak in shallow.values()) + sum(untraced.values())


def _peaks(points: Mapping[int, RankTrace], size: int) -> Mapping[Region, Peak]:
    if len(points) == 1:
        return next(iter(points.values())).peaks
    (low, below), (high, above) = sorted(points.items())

    def line(one: int, other: int) -> int:
        return one + (other - one) * (size - low) // (high - low)

    if [_program(item) for item in below.allocations] == [_program(item) for item in above.allocations]:
        sized = [
            replace(one, num_bytes=line(one.num_bytes, other.num_bytes))
            for one, other in zip(below.allocations, above.allocations, strict=True)
        ]
        return peaks(sized, lambda item: item.category or TEMPORARIES)
    # Other operators ran: the peaks of the regions are the best that is known, and the trace of the answer decides.
    return {
        region: Peak(line(peak.num_bytes, above.peaks[region].num_bytes))
        for region, peak in below.peaks.items()
        if region in above.peaks
    }


def _program(item: Allocation) -> tuple[Any, ...]:
    return item.born, item.died, item.region, item.operation
