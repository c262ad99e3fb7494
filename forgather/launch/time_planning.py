"""The time of a run, and the number of devices that a deadline needs, from the work that a plan has traced.

Takes a `RunWork` and the device of each process; gives plain data, whose forms `forgather/planner/step_time.py`,
`run_time.py` and `device_count.py` describe.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from forgather.errors import ForgatherError
from forgather.launch.planning import Device, traced_plan
from forgather.planner.device_count import DeviceCount, fewest_machines
from forgather.planner.efficiency import assumed_of
from forgather.planner.fit import fit_plan, worst_fit
from forgather.planner.hardware import Hardware
from forgather.planner.run_time import machines_for, run_time
from forgather.planner.step_time import StepTime, step_time
from forgather.planner.work import RunWork
from forgather.project.project import Project

_SCHEDULE = "forgather.ml.planner.pipeline_step:schedule_seconds"


def time_of(
    work: RunWork, hardware: Hardware, *, tokens: float | None = None, price: float | None = None
) -> dict[str, Any]:
    """Returns the time of a step and of the run as plain data, see `StepTime` and `RunTime`.

    Args:
        work: the work of the run.
        hardware: the device of each process.
        tokens: the number of tokens to train on; None for the steps of the config.
        price: the price of a GPU hour; None if it is unknown.
    """
    step = step_of(work, hardware)
    run = run_time(work, step, tokens=tokens, price=price)
    return {"step": step.as_data(), "run": None if run is None else run.as_data()}


def device_count_of(
    project: Project, found: dict[str, Any], work: RunWork, device: Device, *, tokens: float, days: float
) -> dict[str, Any]:
    """Returns how many machines train on a number of tokens within some days, as plain data, see `DeviceCount`.

    Args:
        project: the project, opened with the config.
        found: the memory plan of some number of devices.
        work: the work of the same.
        device: the device of each process.
        tokens: the number of tokens.
        days: the days.
    """
    gpus, hardware = work.local_world_size, device.hardware
    first = machines_for(work, step_of(work, hardware), tokens=tokens, days=days)
    # Messages of another number of devices take another time, and each device holds another part of the model.
    nodes, there, work_there, why_fewer = _plan_near(project, max(1, int(first.high)), found, work)
    step = step_of(work_there, hardware)
    run = run_time(work_there, step, tokens=tokens, price=None)
    assert run is not None  # noqa: S101 - the number of tokens is given
    sizes = [
        (one, fit_plan(plan, hardware, held_bytes=device.held_bytes))
        for one, plan in ((work, found), (work_there, there))
    ]
    decides = worst_fit(sizes[1][1])
    return DeviceCount(
        devices_per_machine=gpus,
        by_time=machines_for(work_there, step, tokens=tokens, days=days),
        by_memory=fewest_machines([(one.world_size // gpus, fits) for one, fits in sizes]),
        planned=nodes,
        why_fewer=why_fewer,
        days=run.hours.times(1 / 24),
        tokens_per_update=round(work_there.rows_per_update * (work_there.tokens_per_row or 1)),
        tokens_before=round(work.rows_per_update * (work.tokens_per_row or 1)),
        verdict="unknown" if decides is None else str(decides.verdict),
    ).as_data()


_WHY_FEWER = {
    "FG703": "the trainer of the config runs in one process; trainers/accel_trainer.yaml runs in several",
}
"""Why more processes cannot be planned, by the code of the error."""


def _plan_near(
    project: Project, nodes: int, found: dict[str, Any], work: RunWork
) -> tuple[int, dict[str, Any], RunWork, str | None]:
    """Returns the plan of a number of machines, or of fewer if the config cannot run on so many, and the reason."""
    gpus = work.local_world_size
    asked = work.world_size // gpus
    why = None
    for number in dict.fromkeys((nodes, min(nodes, 2 * asked))):
        if number == asked:
            break
        try:
            there = traced_plan(project, gpus=gpus, nodes=number, device_type=found["device_type"])
            return number, *there, why
        except ForgatherError as error:
            if error.code not in _WHY_FEWER:
                raise
            why = _WHY_FEWER[error.code]
    return asked, found, work, why


def step_of(work: RunWork, hardware: Hardware) -> StepTime:
    """Returns the time of a step with the assumed efficiencies.

    Args:
        work: the work of the run.
        hardware: the device of each process.
    """
    # Modules outside `forgather.ml` reach it only by name, so that commands without training never load torch.
    module, name = _SCHEDULE.split(":")
    efficiency = hardware.efficiency or assumed_of(hardware.kind)
    return step_time(work, hardware, efficiency, simulate=getattr(import_module(module), name))
