"""The calibration of a device from finished runs: what a step took, next to what was counted in a step.

Takes the records of runs and, if it is known, the device. The steps that each run has measured are read from its
metrics; the work of a step is counted by planning the recorded config again. `forgather.ml.planner.calibration` fits
the efficiencies. The result is the content of a hardware file, which `--hardware` reads. Processors have no entry in
the table: their rates are measured here, so the runs must be from this machine.

Units:
    seconds.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from forgather.errors import PlanError
from forgather.launch.planning import Device, device_of, traced_plan
from forgather.launch.recorded_graph import building
from forgather.planner.efficiency import EFFICIENCIES, assumed_of
from forgather.planner.hardware import Hardware, as_entry, hardware
from forgather.planner.work import RunWork
from forgather.project.path_display import near_path
from forgather.project.project import Project
from forgather.project.run_reader import PastRun
from forgather.source import Span

_METRICS = "forgather.ml.metrics"
_FIT = "forgather.ml.planner.calibration"
_PROCESSORS = "forgather.ml.planner.processors_here:processors_here"
_RATE = "steps_per_second"
_FEWEST_STEPS = 4
"""The fewest steps that are needed if a run logged only once: the first ones fill caches."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run that a calibration learns from.

    Args:
        past: the record of the run.
        project: the config of the run, which plans it again.
        seconds: the time of a step.
        on_gpu: whether it ran on GPUs.
    """

    past: PastRun
    project: Project
    seconds: float
    on_gpu: bool

    @property
    def host(self) -> str:
        """The name of the machine of the main process."""
        return str(self.past.facts.get("ran_on") or self.past.facts.get("hostname"))

    @property
    def processes(self) -> tuple[int, int]:
        """The number of processes on each machine, and of machines."""
        local = self.past.table("processes").get("per_node")
        local = local if isinstance(local, int) and local > 0 else self.past.processes
        return local, max(1, self.past.processes // local)

    @property
    def threads(self) -> int:
        """The number of threads of each process."""
        facts = self.past.table("processors")
        said = str(facts.get("OMP_NUM_THREADS") or "")
        count = facts.get("count")
        return int(said) if said.isdigit() and int(said) > 0 else max(1, (count or 1) // self.processes[0])


def measured_run(past: PastRun, project: Project) -> MeasuredRun:
    """Returns a run with the measured time of its steps.

    Args:
        past: the record of the run.
        project: the config of the run, see `recorded_project`.

    Raises:
        PlanError: FG996 if the run has measured no steps, or only those in which caches are filled.
    """
    metrics = import_module(_METRICS)
    file = os.path.join(past.folder, metrics.METRICS_FILE)
    try:
        lines = [line for line in metrics.read_records(file) if _RATE in line]
    except OSError as error:
        raise PlanError(
            f"the steps of the run were not measured: {near_path(file)!r} cannot be read",
            code="FG996",
            hint="calibrate from a run that logs its metrics (JsonLogger, logging_steps)",
        ) from error
    seconds = metrics.step_seconds(lines)
    last = lines[-1].get("step") if lines else None
    if seconds is None or (len(lines) < 2 and not (isinstance(last, int) and last >= _FEWEST_STEPS)):
        raise PlanError(
            "no step of the run was measured" if seconds is None else "only the first steps of the run were measured",
            code="FG996",
            span=Span(file, 1),
            hint="calibrate from a run with at least two log lines (logging_steps): the first steps fill caches",
        )
    return MeasuredRun(past, project, seconds, on_gpu="memory_peak_bytes" in lines[-1])


def calibration_of(runs: Sequence[MeasuredRun], name: str | None) -> dict[str, Any]:
    """Returns the calibration of a device as plain data.

    Args:
        runs: the runs, at least one.
        name: the device of each process, a name of the table or a file; None for the device of this machine.

    Returns:
        "hardware" is the content of a hardware file. "runs" has for each run its folder, the measured seconds, and
        those that are planned with the calibration. "fitted" has the names of the efficiencies that got a number of
        their own, "common" whether the others were fitted together.

    Raises:
        PlanError: FG996 if the runs do not belong to one device, or not to that of this machine.
    """
    device = _device(runs, name)
    measured = []
    fit = import_module(_FIT)
    for run in runs:
        measured.append(fit.MeasuredStep(work_of(run, device), run.seconds))
    found = fit.calibrate(measured, device, device.efficiency or assumed_of(device.kind))
    errors = [abs(planned / run.seconds - 1) for planned, run in zip(found.planned, runs, strict=True)]
    now = f"{datetime.now(UTC):%Y-%m-%d}"
    efficiency = {one: _rounded(getattr(found.efficiency, one).low) for one in EFFICIENCIES}
    entry = as_entry(device)
    return {
        "hardware": {
            **entry,
            "title": entry["title"].removesuffix(", calibrated") + ", calibrated",
            "efficiency": {
                **efficiency,
                "fitted": list(found.fitted),
                "largest_error": _rounded(max(errors)),
                "source": f"fitted to {len(runs)} run{'s' * (len(runs) > 1)} on {runs[0].host}, {now}",
            },
        },
        "runs": [
            {"run": run.past.folder, "config": run.past.config, "measured": run.seconds, "planned": planned}
            for run, planned in zip(runs, found.planned, strict=True)
        ],
    }


def work_of(run: MeasuredRun, device: Hardware) -> RunWork:
    """Returns the work of a step of a run, whose recorded config is planned again.

    Args:
        run: the run.
        device: the device of each process.
    """
    gpus, nodes = run.processes
    with building(run.past, run.project):
        return traced_plan(run.project, gpus=gpus, nodes=nodes, device_type=Device(device).type)[1]


def _device(runs: Sequence[MeasuredRun], name: str | None) -> Hardware:
    hosts = _values(run.host for run in runs)
    if len(hosts) > 1:
        raise PlanError(
            f"the runs are from the machines {' and '.join(hosts)}",
            code="FG996",
            hint="calibrate each machine from its own runs",
        )
    if len(set(run.on_gpu for run in runs)) > 1:
        message = "some of the runs used GPUs, and some did not"
        raise PlanError(message, code="FG996", hint="calibrate each kind of device from its own runs")
    if name is not None:
        return hardware(name)
    if hosts[0] != platform.node():
        raise PlanError(
            f"the run is from the machine {hosts[0]!r}, and this is {platform.node()!r}",
            code="FG996",
            hint="calibrate on that machine, or name its device: --hardware NAME",
        )
    processes = max(run.processes[0] for run in runs)
    if runs[0].on_gpu:
        device = device_of(None, gpus=processes)
        if device is None:
            message = f"the run {runs[0].past.folder!r} used GPUs, and none is found here"
            raise PlanError(message, code="FG996", hint="name the device: --hardware NAME")
        return device.hardware
    threads = _values(str(run.threads) for run in runs)
    if len(threads) > 1:
        raise PlanError(
            f"the processes of the runs had {' and '.join(threads)} threads",
            code="FG996",
            hint="processes with other numbers of threads are other devices: calibrate them one by one",
        )
    module, function = _PROCESSORS.split(":")
    found: Hardware = getattr(import_module(module), function)(threads=int(threads[0]), processes=processes)
    return found


def _values(found: Iterable[str]) -> list[str]:
    return sorted(set(found))


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
