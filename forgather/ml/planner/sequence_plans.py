"""Plans of other lengths and numbers of rows: those of a grid, and the longest rows that stay below a limit.

Takes a function that makes the trainer; gives plans as plain data. The rows of the data are repeated or cut, see
`row_length.py`, so that lengths are planned that no row of the data has. Each cell of a grid is traced at its own size;
the trainer of all of them is built twice. The longest rows are computed from the traces of a few lengths, and traced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.deep_trace import DepthTraces, depth_traces
from forgather.ml.planner.memory import plan_of
from forgather.ml.planner.rank_trace import MakeTrainer
from forgather.ml.planner.row_limit import without_pipeline
from forgather.ml.planner.row_line import peak_at
from forgather.ml.planner.trace_result import RankTrace
from forgather.ml.planner.window_shape import WindowShape
from forgather.planner.batch_size import largest_size
from forgather.planner.work import RunWork

_MOST_TOKENS = 2**22  # of a row whose model does not say how many positions it has
_MOST_TRACES = 32


class CellSize(NamedTuple):
    """The size of a cell of a grid.

    Args:
        length: the number of tokens of each row.
        rows: the number of rows of a micro-batch.
        micro_batches: the number of micro-batches of an update.
    """

    length: int
    rows: int
    micro_batches: int


def plan_cells(
    make_trainer: MakeTrainer,
    *,
    world_size: int,
    local_world_size: int,
    cells: Sequence[CellSize],
    usual_length: int,
    device_type: str = "cpu",
) -> tuple[list[tuple[dict[str, Any], RunWork] | None], int | None]:
    """Returns the memory plan and the work of each cell, and the number of positions of the model.

    The plan of a cell is None if the model has fewer positions than the rows of the cell have tokens. The number is
    None if none is certain.

    Args:
        make_trainer: a function that returns the trainer of the config, see `trace_shapes`.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        cells: the sizes.
        usual_length: the number of tokens of the longest rows of the run, for which the model has positions.
        device_type: the kind of device, "cpu" or "cuda", see `trace_shapes`.

    Raises:
        PlanError: FG997 for a pipeline, for rows without tokens, and if the tensors of a batch have no common number
            of rows.
    """
    tracer = _Tracer(make_trainer, world_size, local_world_size, device_type)
    # Longer rows are not traced before it is known whether the model has positions for them.
    known = [cell for cell in cells if cell.length <= usual_length] or [min(cells)._replace(length=usual_length)]
    traces = tracer.traces(known)
    positions = traces[known[0]].shallow.facts.max_positions
    later = [cell for cell in cells if cell not in traces and (positions is None or cell.length <= positions)]
    traces |= tracer.traces(later) if later else {}
    common: Any = {"world_size": world_size, "local_world_size": tracer.facts.local_world_size}
    plans = [
        plan_of([trace], [trace], **common, device_type=device_type)
        if (trace := _sized(traces[cell].deep, cell) if cell in traces else None) is not None
        else None
        for cell in cells
    ]
    return plans, positions


def longest_rows(
    make_trainer: MakeTrainer,
    *,
    world_size: int,
    local_world_size: int,
    limit: int,
    size: CellSize,
    step: int,
    device_type: str = "cpu",
) -> dict[str, Any]:
    """Returns the longest rows that fit, in steps of some tokens, see `LargestSize`, as plain data.

    Its `size` and `traced` are numbers of tokens. `max_positions` is the number of positions of the model, or None, and
    `is_bound_by_positions` says whether one step more would exceed it while the memory would not be exceeded so far.

    Args:
        make_trainer: a function that returns the trainer of the config, see `trace_shapes`.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        limit: the limit of one rank in bytes.
        size: the size of the run: the length is where the search begins.
        step: the number of tokens of a step.
        device_type: the kind of device, "cpu" or "cuda", see `trace_shapes`.

    Raises:
        PlanError: FG997 as of `plan_cells`, and if the model has fewer positions than a step has tokens.
    """
    tracer = _Tracer(make_trainer, world_size, local_world_size, device_type)
    traces: dict[int, DepthTraces] = {}

    def measure(steps: Sequence[int]) -> list[DepthTraces]:
        missing = [number for number in steps if number not in traces]
        cells = [size._replace(length=number * step) for number in missing]
        if cells:
            traces.update(zip(missing, tracer.traces(cells).values(), strict=True))
        return [traces[number] for number in steps]

    usual = max(2, size.length // step)
    # Rows of a huge step are not traced before it is known whether the model has positions for them.
    first = tracer.traces([size])[size] if step > size.length else measure((1,))[0]
    positions = first.shallow.facts.max_positions
    most = (positions or _MOST_TOKENS) // step
    if most < 1:
        bound = f"{_MOST_TOKENS} tokens that are tried" if positions is None else f"{positions} positions of the model"
        raise PlanError(
            f"a step of {step} tokens is longer than the {bound}",
            code="FG997",
            hint=f"search in smaller steps: --longest {max(1, (positions or _MOST_TOKENS) // 8)}",
        )
    found = largest_size(measure, peak_at, limit, most=most, first=(1, usual, 2 * usual), most_traces=_MOST_TRACES)
    return {
        **asdict(found),
        "size": found.size * step,
        "traced": [number * step for number in found.traced],
        "step": step,
        "rows": size.rows,
        "max_positions": positions,
        "is_bound_by_positions": positions is not None and found.size == most,
    }


class _Tracer:
    """Traces rank 0 of a run without a pipeline at any size."""

    def __init__(self, make_trainer: MakeTrainer, world_size: int, local_world_size: int, device_type: str) -> None:
        self._make_trainer = functools.partial(without_pipeline, make_trainer, device_type)
        self._device_type = device_type
        local = min(local_world_size, world_size)
        self.facts = ProcessFacts(rank=0, local_rank=0, world_size=world_size, local_world_size=local)

    def traces(self, cells: Sequence[CellSize]) -> dict[CellSize, DepthTraces]:
        """Returns the traces of some sizes; the trainer is built once for each depth."""
        shapes = [WindowShape(rows=one.rows, micro_batches=one.micro_batches, length=one.length) for one in cells]
        found = depth_traces(self._make_trainer, self.facts, shapes, device_type=self._device_type)
        return dict(zip(cells, found, strict=True))


def _sized(trace: RankTrace, cell: CellSize) -> RankTrace:
    """Returns a trace with the sizes of its cell as facts; those of the config are in the facts of the trainer."""
    facts = trace.facts
    settings = facts.settings
    present = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    rows = facts.rows_per_update // present * cell.rows * cell.micro_batches
    sizes = {"per_device_train_batch_size": cell.rows, "gradient_accumulation_steps": cell.micro_batches}
    settings = {**settings, **sizes}
    return replace(trace, facts=replace(facts, rows_per_update=rows, mean_rows_per_update=rows, settings=settings))
