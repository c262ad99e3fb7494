"""The plan of a run: its memory on each rank, computed in the current process without weights and without devices.

The inputs are a `Project` and a number of processes. The output is plain data, whose form
`forgather/planner/memory_plan.py` describes. Nothing is written and no process is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from forgather.errors import ProjectError
from forgather.launch.in_process import MAIN
from forgather.planner.fit import fit_plan
from forgather.planner.hardware import Hardware
from forgather.project.project import Project

# Modules outside `forgather.ml` reach it only by name, so that commands without training never load torch.
_PLAN = "forgather.ml.planner.memory:plan_memory"
_DEVICE = "forgather.ml.planner.devices_here:device_here"


def plan_of(project: Project, *, gpus: int, nodes: int) -> dict[str, Any]:
    """Returns the memory plan of a config, see `MemoryPlan`.

    Args:
        project: the project, opened with the config.
        gpus: the number of processes on each machine.
        nodes: the number of machines.

    Raises:
        ProjectError: FG462 if a number is below 1.
        Exception: if the construction of the config's objects fails; the exception is raised unchanged.
    """
    for name, number in (("--gpus", gpus), ("--nodes", nodes)):
        if number < 1:
            raise ProjectError(f"{name} is {number}", code="FG462", hint="give a number above 0")
    plan = _imported(_PLAN)
    with project.located():
        found: dict[str, Any] = plan(
            lambda hook: project.build_with(hook, MAIN), world_size=gpus * nodes, local_world_size=gpus
        )
    return found


def fit_of(found: Mapping[str, Any], hardware: Hardware | None, *, gpus: int) -> dict[str, Any] | None:
    """Returns whether a plan fits as plain data; None if no hardware is named and this machine has no GPU.

    Args:
        found: the plan as data, see `MemoryPlan`.
        hardware: the device of each process; None looks for the GPUs of this machine.
        gpus: the number of processes on each machine.
    """
    held_bytes = 0
    if hardware is None:
        here = _imported(_DEVICE)(gpus)
        if here is None:
            return None
        hardware, held_bytes = here
    ranks = [fit.as_data() for fit in fit_plan(found, hardware, held_bytes=held_bytes)]
    return {"hardware": hardware.as_data(), "held_bytes": held_bytes, "ranks": ranks}


def _imported(constructor: str) -> Any:
    module, name = constructor.split(":")
    return getattr(import_module(module), name)
