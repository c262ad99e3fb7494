"""Plans of other lengths of rows: a grid of lengths by numbers of rows, and the longest rows that fit.

Takes a `Project` and its plan; gives plain data. The length of the config is an argument of the function that makes its
rows of tokens. Data sets without such an argument are refused, because no setting would give rows of another length.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

from forgather.batch_triangle import GLOBAL, ROWS, SCHEDULE, STEPS, batch_facts
from forgather.config.graph import Call, Node, Scalar, is_null
from forgather.config.traverse import walk
from forgather.errors import PlanError
from forgather.launch.in_process import MAIN
from forgather.launch.planning import Device
from forgather.launch.time_planning import step_of
from forgather.planner.fit import fit_plan, largest_peak, refuse_without_room
from forgather.planner.grid import Axes, GridCell, too_few_rows
from forgather.project.project import Project
from forgather.project.trainer_arguments import keyword, trainer_arguments

STEP = 64
"""The tokens by which the longest rows are searched for."""

_CELLS = "forgather.ml.planner.sequence_plans:plan_cells"
_LONGEST = "forgather.ml.planner.sequence_plans:longest_rows"
_DATA = "forgather.ml.data"
_TEXT = "block_size"
_LENGTHS = {
    "tokenize": _TEXT,
    "tokenize_chats": "max_length",
    "tokenize_examples": "max_length",
    "tokenize_feedback": "max_length",
    "tokenize_labelled": "max_length",
    "tokenize_preferences": "max_length",
    "tokenize_tagged": "max_length",
    "pack_examples": "max_length",
}
"""The functions whose rows have a length that can be set, and the argument that sets it."""


class RowLength(NamedTuple):
    """The length of the rows of a config.

    Args:
        name: the argument that sets it.
        value: the number of tokens.
    """

    name: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes and devices of the plans.

    Args:
        gpus: the number of processes on each machine.
        nodes: the number of machines.
        device_type: the kind of device, "cpu" or "cuda".
        device: the device of each process; None if it is unknown.
        limit: the bytes that the tensors of a process may take; None leaves it to the device.
    """

    gpus: int
    nodes: int
    device_type: str
    device: Device | None = None
    limit: int | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of a trace."""
        world = self.gpus * self.nodes
        return {"world_size": world, "local_world_size": self.gpus, "device_type": self.device_type}


def row_length(project: Project) -> RowLength:
    """Returns the length of the rows of a config, and the argument that sets it, without building anything.

    Raises:
        PlanError: FG997 if the training data has no such argument, two of them, or one that is not a plain number; also
            if the number of micro-batches changes during the run.
    """
    _refuse_schedule(project)
    main = project.graph.targets[MAIN].value
    rows = keyword(main, "train_dataset")
    calls = [node for _, node in walk([((), rows)])] if rows is not None else []
    made = [
        (node, _LENGTHS[name]) for node in calls if isinstance(node, Call) and (name := _function(node)) in _LENGTHS
    ]
    if not made:
        raise _without_length(rows, [_function(node) for node in calls if isinstance(node, Call)])
    return max((RowLength(name, _number(node, name)) for node, name in made), key=lambda one: one.value)


def _function(call: Call) -> str:
    """Returns the name of a function of our data sets; the whole constructor if it is another one."""
    module, _, name = call.constructor.partition(":")
    return name if module == _DATA or module.startswith(f"{_DATA}.") else call.constructor


def _without_length(rows: Node | None, constructors: Sequence[str]) -> PlanError:
    if "tokenize_seq2seq" in constructors:
        what = "its rows have two lengths, max_source_length and max_target_length"
        hint = "plan the sizes one by one, with --set train_dataset.max_source_length=..."
    else:
        maker = f" ({constructors[0]})" if constructors else ""
        what = f"no argument of train_dataset{maker} sets the length of its rows in tokens"
        hint = f"rows with a length are those of {', '.join(_LENGTHS)} (forgather.ml.data)"
    span = rows.span if rows is not None else None
    return PlanError(
        f"other lengths of rows are not planned: {what}", code="FG997", span=span, path="train_dataset", hint=hint
    )


def _number(call: Call, name: str) -> int:
    node = keyword(call, name)
    if node is None:
        function = getattr(import_module(_DATA), _function(call))
        return int(inspect.signature(function).parameters[name].default)
    if isinstance(node, Scalar) and isinstance(node.value, int) and not isinstance(node.value, bool) and node.value > 0:
        return node.value
    raise PlanError(
        f"{name} is not a plain number, so that no lengths follow from it",
        code="FG997",
        span=node.span,
        hint=f"write the number of tokens of a row: {name}: 2048",
    )


def grid_of(
    project: Project, found: Mapping[str, Any], usual: RowLength, axes: Axes, cluster: Cluster
) -> dict[str, Any]:
    """Returns a grid of lengths by numbers of rows as plain data.

    Args:
        project: the project, opened with the config.
        found: the plan of the config as data.
        usual: the length of the rows of the config.
        axes: the axes; what is empty is taken around the values of the config.
        cluster: the processes and devices.

    Raises:
        PlanError: FG997 if the tensors of a batch have no common number of rows, and for a pipeline.
    """
    axes = axes.around(usual.value, found["settings"][ROWS])
    numbers = {rows: _micro_batches(project, found, rows, cluster) for rows in axes.rows}
    cells = [GridCell(length=length, rows=rows) for length in axes.lengths for rows in axes.rows]
    module, function = _CELLS.split(":")
    size = import_module(module).CellSize
    asked = {
        cell: size(cell.length, cell.rows, number) for cell in cells if isinstance(number := numbers[cell.rows], int)
    }
    plans, positions = [], None
    if asked:
        with project.located():
            plans, positions = getattr(import_module(module), function)(
                lambda hook: project.build_with(hook, MAIN),
                **cluster.sizes,
                cells=list(asked.values()),
                usual_length=usual.value,
            )
    planned = dict(zip(asked, plans, strict=True))
    reasons = {rows: reason for rows, reason in numbers.items() if not isinstance(reason, int)}
    return {
        "setting": usual.name,
        "length": usual.value,
        "rows": found["settings"][ROWS],
        "limit": cluster.limit,
        "max_positions": positions,
        "cells": [
            replace(cell, reason=reasons[cell.rows]).as_data()
            if cell.rows in reasons
            else _cell(_noted(cell, asked[cell].micro_batches, found, usual), planned[cell], positions, cluster)
            for cell in cells
        ],
    }


def _noted(cell: GridCell, micro_batches: int, found: Mapping[str, Any], usual: RowLength) -> GridCell:
    """Returns a cell with its micro-batches, and with a note if the data is known to have too few rows for it."""
    most_rows = found["most_rows"]
    if most_rows is not None and usual.name == _TEXT:
        # A text is cut into more rows if they are shorter.
        most_rows = most_rows * usual.value // cell.length
    elif cell.length < usual.value:
        most_rows = None
    return replace(cell, micro_batches=micro_batches, note=too_few_rows(cell.rows, most_rows))


def _cell(cell: GridCell, plan: Any, positions: int | None, cluster: Cluster) -> dict[str, Any]:
    if plan is None:
        return replace(cell, reason=f"max_position_embeddings of the model is {positions:,}").as_data()
    memory, work = plan
    hardware = None if cluster.device is None else cluster.device.hardware
    held = 0 if cluster.device is None else cluster.device.held_bytes
    fits = () if hardware is None else fit_plan(memory, hardware, held_bytes=held)
    filled = cell.planned(memory, fits, cluster.limit)
    if hardware is not None and hardware.gives_times:
        filled = replace(filled, tokens_per_second=step_of(work, hardware).tokens_per_second)
    return filled.as_data()


def refuse_without_limit(device: Device | None, limit: int | None) -> None:
    """Raises an error if nothing limits the length of rows.

    Args:
        device: the device of each process; None if it is unknown.
        limit: the bytes that the tensors of a process may take; None leaves it to the device.

    Raises:
        PlanError: FG993 if neither has a limit.
    """
    if limit is None and (device is None or device.hardware.memory_bytes is None):
        raise PlanError(
            "--longest needs a limit of memory",
            code="FG993",
            hint="add --hardware, for example --hardware rtx-4090, or --memory 24GB",
        )


def longest_of(
    project: Project, found: Mapping[str, Any], usual: RowLength, step: int, cluster: Cluster
) -> dict[str, Any]:
    """Returns the longest rows that fit with the config's number of rows, as plain data.

    Args:
        project: the project, opened with the config.
        found: the plan of the config as data.
        usual: the length of the rows of the config.
        step: the number of tokens by which lengths are tried.
        cluster: the processes and devices, whose memory is limited, see `refuse_without_limit`.

    Raises:
        PlanError: FG992 if the device has no room for tensors; FG997 as of `grid_of`.
    """
    device, limit = cluster.device, cluster.limit
    if limit is None:
        assert device is not None  # noqa: S101 - something limits the memory
        refuse_without_room(device.hardware, found["mesh"], held_bytes=device.held_bytes)
        limit = int(
            largest_peak(
                device.hardware,
                found["mesh"],
                held_bytes=device.held_bytes,
                convolution_bytes=found["convolution_bytes"],
            )
        )
    module, function = _LONGEST.split(":")
    settings = found["settings"]
    size = import_module(module).CellSize(usual.value, settings[ROWS], settings[STEPS])
    with project.located():
        answer: dict[str, Any] = getattr(import_module(module), function)(
            lambda hook: project.build_with(hook, MAIN), **cluster.sizes, limit=limit, size=size, step=step
        )
    return {**answer, "setting": usual.name, "limit": limit}


def _micro_batches(project: Project, found: Mapping[str, Any], rows: int, cluster: Cluster) -> int | str:
    """Returns the number of micro-batches of an update with some rows each; the reason if there is none."""
    arguments = trainer_arguments(project.graph)
    total = None if arguments is None else arguments.global_batch()
    if arguments is None or total is None:
        return int(found["settings"][STEPS])
    steps = arguments.plain(STEPS)
    given = {GLOBAL: total} | ({} if steps is None else {STEPS: steps})
    sizes = {
        name: arguments.plain(name) for name in ("data_parallel_size", "tensor_parallel_size", "context_parallel_size")
    }
    world = {"world_size": cluster.gpus * cluster.nodes}
    facts = batch_facts({**given, ROWS: rows, "given": (*given, ROWS), **sizes, **world})
    return int(facts.get(STEPS, given.get(STEPS))) if facts["batch_fault"] is None else str(facts["batch_fault"])


def _refuse_schedule(project: Project) -> None:
    arguments = trainer_arguments(project.graph)
    node = None if arguments is None else arguments.get(SCHEDULE)
    if node is not None and not is_null(node):
        raise PlanError(
            f"other sizes are not planned: {SCHEDULE} changes the number of micro-batches during the run",
            code="FG997",
            span=node.span,
            hint="plan a constant number: --set trainer_args.accumulate_grad_batches=~",
        )
