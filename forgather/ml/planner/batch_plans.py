"""The plans of one run with several batches: the same update, divided into micro-batches in several ways.

`plan_batches` traces the smallest and the largest of the accumulated micro-batches, and the whole update as one;
`row_line.py` computes all between them, unless the two run different programs: then each size is traced. Pipelines are
not planned here: their stages are made for one number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.deep_trace import DepthTraces, depth_traces
from forgather.ml.planner.memory import plan_of
from forgather.ml.planner.rank_trace import MakeTrainer, RankTrace
from forgather.ml.planner.row_line import runs_one_program, trace_at
from forgather.ml.planner.window_shape import WindowShape
from forgather.planner.work import RunWork


def plan_batches(
    make_trainer: MakeTrainer,
    *,
    world_size: int,
    local_world_size: int,
    batches: Sequence[tuple[int, int]],
    device_type: str = "cpu",
) -> list[tuple[dict[str, Any], RunWork]]:
    """Returns the memory plan and the work of a run for several batches, see `plan_run`.

    Args:
        make_trainer: a function that returns the trainer of the config, see `trace_shapes`.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        batches: pairs of the rows of a micro-batch and the number of micro-batches of an update.
        device_type: the kind of device, "cpu" or "cuda", see `trace_shapes`.

    Raises:
        PlanError: FG997 if the tensors of a batch have no common number of rows.
    """
    local = min(local_world_size, world_size)
    facts = ProcessFacts(rank=0, local_rank=0, world_size=world_size, local_world_size=local)
    accumulated = sorted(rows for rows, number in batches if number > 1)
    points = sorted({*accumulated[:1], *accumulated[-1:]})
    whole = [rows for rows, number in batches if number == 1]

    def trace(sizes: Sequence[tuple[int, int]]) -> tuple[dict[tuple[int, int], DepthTraces], ...]:
        shapes = [
            WindowShape(rows=rows, micro_batches=n, longest=longest) for longest in (True, False) for rows, n in sizes
        ]
        found = depth_traces(make_trainer, facts, shapes, device_type=device_type)
        return tuple(dict(zip(sizes, part, strict=True)) for part in (found[: len(sizes)], found[len(sizes) :]))

    longest, usual = trace([*((rows, 2) for rows in points), *((rows, 1) for rows in whole)])
    if len(accumulated) > len(points) and not all(
        runs_one_program({size: traced[size, 2] for size in points}) for traced in (longest, usual)
    ):
        # Nothing follows from these two: each number of rows is traced itself.
        others = trace([(rows, 2) for rows in accumulated if rows not in points])
        longest, usual = {**longest, **others[0]}, {**usual, **others[1]}

    def trace_of(traced: Mapping[tuple[int, int], DepthTraces], rows: int, micro_batches: int) -> RankTrace:
        if micro_batches == 1:
            return _sized(traced[rows, 1].deep, rows, 1)
        line = {rows: traced[rows, 2]} if (rows, 2) in traced else {size: traced[size, 2] for size in points}
        return _sized(trace_at(line, rows, micro_batches), rows, micro_batches)

    common: Any = {"world_size": world_size, "local_world_size": local, "device_type": device_type}
    return [plan_of([trace_of(longest, *batch)], [trace_of(usual, *batch)], **common) for batch in batches]


def _sized(trace: RankTrace, rows: int, micro_batches: int) -> RankTrace:
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    return replace(trace, facts=replace(trace.facts, settings={**trace.facts.settings, **sizes}))
