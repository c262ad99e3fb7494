"""The plan of a run: its memory on each rank, computed in the current process without weights and without devices.

The inputs are a `Project` and a number of processes. The output is plain data, whose form
`forgather/planner/memory_plan.py` describes. Nothing is written and no process is started.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any, NamedTuple

from forgather.errors import ForgatherError, ProjectError
from forgather.launch.in_process import MAIN
from forgather.planner.batch_size import Peaks, largest_size, peak_of_worst, peaks_of_ranks
from forgather.planner.choices import ROWS
from forgather.planner.fit import fit_plan
from forgather.planner.hardware import Hardware, hardware
from forgather.planner.storage import disk_rows, host_rows
from forgather.planner.work import RunWork
from forgather.project.project import Project
from forgather.project.trainer_arguments import TrainerArguments, trainer_arguments

MOST_ROWS = 4096
"""The largest batch that is searched for."""

# Modules outside `forgather.ml` reach it only by name, so that commands without training never load torch.
_PLAN = "forgather.ml.planner.memory:plan_run"
_ROWS = "forgather.ml.planner.row_limit:largest_rows"
_PAGE = "forgather.ml.report.plan_page:plan_page"
_DEVICE = "forgather.ml.planner.devices_here:device_here"


def traced_plan(project: Project, *, gpus: int, nodes: int, device_type: str = "cpu") -> tuple[dict[str, Any], RunWork]:
    """Returns the memory plan of a config, and the work of its steps, from the same traces.

    The plan is a `MemoryPlan` as data, with the rows of a machine's memory and of the disk.

    Args:
        project: the project, opened with the config.
        gpus: the number of processes on each machine.
        nodes: the number of machines.
        device_type: the kind of device, "cpu" or "cuda": optimizers take another path on a GPU.

    Raises:
        ProjectError: FG462 if a number is below 1.
        Exception: if the construction of the config's objects fails; the exception is raised unchanged.
    """
    for name, number in (("--gpus", gpus), ("--nodes", nodes)):
        if number < 1:
            raise ProjectError(f"{name} is {number}", code="FG462", hint="give a number above 0")
    module, function = _PLAN.split(":")
    plan = getattr(import_module(module), function)
    with project.located():
        found, work = plan(
            lambda hook: project.build_with(hook, MAIN),
            world_size=gpus * nodes,
            local_world_size=gpus,
            device_type=device_type,
        )
    host, disk = host_rows(found, processes=gpus), disk_rows(found)
    return {**found, "host": [asdict(row) for row in host], "disk": [asdict(row) for row in disk]}, work


def rows_within(
    project: Project,
    *,
    gpus: int,
    nodes: int,
    limit: int,
    device_type: str = "cpu",
    most: int = MOST_ROWS,
    within_data: bool = False,
) -> dict[str, Any]:
    """Returns the largest number of rows of a micro-batch with which each process stays below a limit.

    Args:
        project: the project, opened with the config.
        gpus: the number of processes on each machine.
        nodes: the number of machines.
        limit: the limit of each process in bytes.
        device_type: the kind of device, "cpu" or "cuda", see `traced_plan`.
        most: the largest number of rows to try.
        within_data: whether no more rows are tried than the data has, because a run would be refused.

    Returns:
        See `forgather.planner.batch_size.LargestSize`; "unit" is of what the rows are multiples, and "pipeline_chunks"
        the number of micro-batches of a pipeline with which this is so. "most_rows" is the number of rows for which
        the data suffices; None for a stream.

    Raises:
        PlanError: FG997 for batches whose tensors have no common number of rows.
    """
    found: dict[str, Any]
    arguments = trainer_arguments(project.graph)
    if arguments is not None and arguments.is_pipeline and gpus * nodes > 1:
        cluster = {"gpus": gpus, "nodes": nodes, "device_type": device_type}
        found = _pipeline_rows(project, arguments, limit, cluster, most, within_data=within_data)
        return {**found, "limit": limit}
    module, function = _ROWS.split(":")
    largest = getattr(import_module(module), function)
    with project.located():
        found = largest(
            lambda hook: project.build_with(hook, MAIN),
            world_size=gpus * nodes,
            local_world_size=gpus,
            limit=limit,
            most=most,
            within_data=within_data,
            device_type=device_type,
        )
    return {**found, "limit": limit, "unit": 1, "pipeline_chunks": None}


def _pipeline_rows(
    project: Project,
    arguments: TrainerArguments,
    limit: int,
    cluster: Mapping[str, Any],
    most: int,
    *,
    within_data: bool,
) -> dict[str, Any]:
    """Returns the largest rows of a pipeline that keeps its number of micro-batches: the worst rank decides.

    The stages are made for one number of rows, so each number that is traced is a plan of its own.
    """
    usual, work = traced_plan(project, **cluster)
    chunks, most_rows = work.micro_batches, usual["most_rows"]
    most = min(most, most_rows) if within_data and most_rows else most

    def measure(sizes: Sequence[int]) -> list[Peaks]:
        return [peaks_of_ranks(traced_plan(sized(size), **cluster)[0]) for size in sizes]

    def sized(size: int) -> Project:
        changed = copy.copy(project)
        settings = {ROWS: size * chunks, "pipeline_chunks": chunks}
        changed.add_overrides([(arguments.path(name), str(value)) for name, value in settings.items()])
        return changed

    found = asdict(largest_size(measure, peak_of_worst, limit, most=max(1, most // chunks)))
    rows = {"size": found["size"] * chunks, "traced": tuple(size * chunks for size in found["traced"])}
    return {**found, **rows, "unit": chunks, "pipeline_chunks": chunks, "most_rows": most_rows}


class Device(NamedTuple):
    """The device of each process.

    Args:
        hardware: its facts.
        held_bytes: what is held on it already; 0 if it is not known.
    """

    hardware: Hardware
    held_bytes: int = 0

    @property
    def type(self) -> str:
        """Torch's name of this kind of device: "cpu" or "cuda", which AMD's GPUs have as well."""
        return "cpu" if self.hardware.kind == "cpu" else "cuda"


def device_of(name: str | None, *, gpus: int) -> Device | None:
    """Returns the device of each process; None if no hardware is named and this machine has no GPU.

    Args:
        name: a name of the table of hardware or a file; None looks for the GPUs of this machine.
        gpus: the number of processes on each machine.

    Raises:
        PlanError: FG994 or FG995 if there is no such hardware.
    """
    if name is not None:
        return Device(hardware(name))
    module, function = _DEVICE.split(":")
    here = getattr(import_module(module), function)(gpus)
    return None if here is None else Device(*here)


def free_on(device: Device | None, free_bytes: int | None, device_type: str | None) -> Device | None:
    """Returns a device of which only some memory is free.

    Args:
        device: the device; None if it is unknown.
        free_bytes: the free memory; None if it is not given.
        device_type: the kind of an unknown device, "cpu" or "cuda"; None for "cuda".
    """
    if free_bytes is None:
        return device
    if device is None:
        return Device(Hardware(name="given", title="a device", kind=device_type or "cuda", memory_bytes=free_bytes))
    if device.hardware.memory_bytes is None:
        return Device(replace(device.hardware, memory_bytes=free_bytes))
    return Device(device.hardware, max(0, device.hardware.memory_bytes - free_bytes))


def fit_on(found: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Returns whether the ranks of a plan fit on a device, as plain data.

    Args:
        found: the plan as data, see `MemoryPlan`.
        device: the device of each process.
    """
    ranks = [fit.as_data() for fit in fit_plan(found, device.hardware, held_bytes=device.held_bytes)]
    return {"hardware": device.hardware.as_data(), "held_bytes": device.held_bytes, "ranks": ranks}


def error_line(error: Exception) -> str:
    """Returns the first line of an error, with its code or its type, as the reason why something cannot be planned."""
    # The text of an error of Forgather begins with its code.
    kind = "" if isinstance(error, ForgatherError) else f"{type(error).__name__}: "
    return kind + (str(error).strip().splitlines() or [""])[0]


def page_of(found: Mapping[str, Any]) -> str:
    """Returns a plan as an HTML document.

    Args:
        found: the plan as data, with `config`, `fit`, `time` and `largest_batch`.
    """
    module, function = _PAGE.split(":")
    page: str = getattr(import_module(module), function)(found)
    return page
