"""The plan of a run: its memory on each rank, computed in the current process without weights and without devices.

The inputs are a `Project` and a number of processes. The output is plain data, whose form
`forgather/planner/memory_plan.py` describes. Nothing is written and no process is started.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from forgather.errors import ProjectError
from forgather.launch.in_process import MAIN
from forgather.project.project import Project

_PLAN = "forgather.ml.planner.memory:plan_memory"


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
    # Modules outside `forgather.ml` reach it only by name, so that commands without training never load torch.
    module, name = _PLAN.split(":")
    plan = getattr(import_module(module), name)
    with project.located():
        found: dict[str, Any] = plan(
            lambda hook: project.build_with(hook, MAIN), world_size=gpus * nodes, local_world_size=gpus
        )
    return found
