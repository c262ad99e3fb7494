"""Trials of a batch on the devices of a run, before the run: all processes try together, and go down together.

With `auto_find_batch_size: true`, `confirmed_rows` starts a process next to each process of the run. These processes
build the run and compute two steps of its longest rows. If the memory of one of them does not suffice, all are ended,
and all try a smaller batch. A trial that has ended holds no memory, and the run itself has computed nothing: it is that
of a config with the number written. A trial ends with the run that has started it, also if that one is killed. Run as a
module, this file is such a process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from importlib import import_module
from typing import Any, NamedTuple

from forgather.errors import PlanError
from forgather.interrupt import end_promptly
from forgather.launch.bound_process import BoundProcess, end_with_parent
from forgather.launch.in_process import MAIN
from forgather.launch.multi_process import children_environment
from forgather.launch.plan_check import is_out_of_memory
from forgather.launcher_env import compared_by_launcher
from forgather.planner.batch_size import smaller_sizes
from forgather.planner.choices import DEFAULTS, MICRO_BATCHES, ROWS
from forgather.project.project import Project
from forgather.project.trainer_arguments import TrainerArguments, trainer_arguments

TRY = "auto_find_batch_size"
_TRIAL = "forgather.ml.planner.batch_trial:try_batch"
_FITS, _FAILS, _TOO_LARGE = 0, 1, 75
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0


class Tried(NamedTuple):
    """The result of trials.

    Args:
        rows: the rows of a micro-batch with which the run goes on.
        too_large: the larger numbers of rows that were tried before, in this order.
        why_not: why `rows` could not be tried; "" if it fits.
        changes: the settings with which the run goes on, by name.
    """

    rows: int
    too_large: tuple[int, ...]
    why_not: str
    changes: Mapping[str, int | bool]

    def line(self) -> str:
        """Returns the line that is printed at the start of the run."""
        before = f"; {', '.join(map(str, self.too_large))} did not fit" if self.too_large else ""
        if self.why_not:
            return f"{TRY}: {ROWS} is {self.rows}, which could not be tried ({self.why_not}){before}"
        return f"{TRY}: {ROWS} is {self.rows}, tried on all devices{before}"


def asks_for_trial(project: Project) -> bool:
    """Returns whether a config asks for trials of its batch."""
    arguments = trainer_arguments(project.graph)
    if arguments is None or not arguments.call.constructor.startswith("forgather."):
        return False
    return arguments.plain(TRY) is True


def confirmed_rows(project: Project, member: Any = None) -> Tried:
    """Tries batches on the devices until one fits, and returns its rows. All processes of a run call it together.

    Args:
        project: the project, opened with the config, in which each `auto` is replaced; it is not changed.
        member: the current process as a `Peer` of several processes, or None if there is only one process.

    Raises:
        PlanError: FG948 if not even the smallest batch fits.
    """
    arguments = trainer_arguments(project.graph)
    assert arguments is not None  # noqa: S101 - they ask for the trial
    tried: list[int] = []
    for number, changes in enumerate(_batches(arguments, 1 if member is None else member.facts.world_size)):
        rows = changes[ROWS]
        status, why = _Trial(project, arguments, changes, member, number).result()
        if status != _TOO_LARGE:
            return Tried(rows, tuple(tried), why if status == _FAILS else "", {**changes, TRY: False})
        tried.append(rows)
    raise PlanError(
        f"{TRY} is true, and no batch fits on the devices: {', '.join(map(str, tried))} rows were tried",
        code="FG948",
        hint="`fgcli plan` shows what takes the memory, and what makes it smaller",
    )


def _batches(arguments: TrainerArguments, world_size: int) -> Iterator[dict[str, int]]:
    """Yields the sizes to try, the largest first; with a global batch, those that accumulation completes to it."""
    update, steps = arguments.global_batch(), arguments.plain(MICRO_BATCHES)
    replicas = arguments.replicas(world_size)
    rows = arguments.plain(ROWS)
    if not isinstance(rows, int):
        count = steps if isinstance(steps, int) else 1
        rows = DEFAULTS[ROWS] if update is None else update // (replicas * count)
    chunks = arguments.plain("pipeline_chunks")
    unit = chunks if isinstance(chunks, int) else 1
    yield {ROWS: rows}
    if update is None:
        yield from ({ROWS: smaller} for smaller in smaller_sizes(rows, unit))
        return
    for smaller in range(rows - 1, 0, -1):
        if update % (smaller * replicas) == 0 and smaller % unit == 0:
            yield {ROWS: smaller, MICRO_BATCHES: update // (smaller * replicas)}


class _Trial:
    """One trial: a process next to this one, which is ended as soon as another one has failed."""

    def __init__(
        self, project: Project, arguments: TrainerArguments, changes: Mapping[str, int], member: Any, number: int
    ) -> None:
        self._member = member
        self._name = f"trial/{number}"
        overrides = [
            *project.overrides,
            *((arguments.path(name), str(value)) for name, value in changes.items()),
            (arguments.path(TRY), "false"),
        ]
        self._request = {
            "config": project.config_name,
            "project_dir": project.meta.project_dir,
            "overrides": overrides,
            "variables": dict(project.variables),
            "now": project.instant.replace(tzinfo=None).isoformat(),
        }

    def result(self) -> tuple[int, str]:
        """Returns the status of the trial on all processes, and why it failed if it is not the memory."""
        with tempfile.TemporaryFile("w+") as errors, children_environment():
            process = BoundProcess(
                [sys.executable, "-m", "forgather.launch.batch_trial"],
                env=self._environment(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                request=f"{json.dumps(self._request)}\n",
            )
            try:
                is_ended = self._wait(process)
            finally:
                process.end()
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.strip()]
        why = lines[-1].strip() if lines and process.returncode else ""
        # A process that was ended because of another one says nothing about its own memory. Of what else the system
        # ends, memory is the usual reason.
        by_signal = _FITS if is_ended else _TOO_LARGE if process.returncode == -signal.SIGKILL else _FAILS
        status = by_signal if process.returncode < 0 else _kind(process.returncode)
        return _agreed(self._member, self._name, status, why)

    def _wait(self, process: BoundProcess) -> bool:
        """Waits until the process or that of another rank has ended; returns whether it must be ended."""
        patience: float | None = None
        while process.poll() is None:
            others = [] if self._member is None else [one["status"] for one in _told(self._member, self._name).values()]
            if _TOO_LARGE in others:
                return True
            # What fails on one rank may only follow from what is about to be said by this one.
            if _FAILS in others and patience is None:
                patience = time.monotonic() + _GRACE_SECONDS
            if patience is not None and time.monotonic() > patience:
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _environment(self) -> dict[str, str]:
        if self._member is None:
            return dict(os.environ)
        # The trial has a rendezvous of its own, next to the one of the run.
        port = self._member.share(f"{self._name}/port", {"port": _free_port()} if self._member.is_main else None)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        return {**kept, "MASTER_PORT": str(port["port"])}


def _agreed(member: Any, name: str, status: int, why: str) -> tuple[int, str]:
    """Returns the same answer on all processes: what one of them lacks, all lack.

    Args:
        member: the current process as a `Peer` of several processes, or None if there is only one process.
        name: the name of the trial.
        status: the status of the trial on this process.
        why: why it failed.
    """
    if member is None:
        return status, why
    member.store.set(f"{name}/{member.facts.rank}", json.dumps({"status": status, "why": why}))
    while len(told := _told(member, name)) < member.facts.world_size:
        time.sleep(_POLL_SECONDS)
    answers = [told[rank] for rank in sorted(told)]
    # A lost connection follows from a process that lacked memory.
    ordered = sorted(answers, key=lambda one: (_TOO_LARGE, _FAILS, _FITS).index(one["status"]))
    return ordered[0]["status"], ordered[0]["why"]


def _told(member: Any, name: str) -> dict[int, dict[str, Any]]:
    """Returns what processes have said about a trial, by rank; those that have not ended it are missing."""
    keys = {rank: f"{name}/{rank}" for rank in range(member.facts.world_size)}
    return {rank: json.loads(member.store.get(key)) for rank, key in keys.items() if member.store.check([key])}


def _kind(status: int) -> int:
    return status if status in (_FITS, _TOO_LARGE) else _FAILS


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port: int = taken.getsockname()[1]
        return port


def _try_here(request: Mapping[str, Any], say: Callable[[str], object]) -> int:
    """Builds the run of a request and tries its batch in this process; returns the exit status."""
    overrides = [(path, text) for path, text in request["overrides"]]
    project = Project(request["config"], request["project_dir"], overrides=overrides, **request["variables"])
    project.set_clock(datetime.fromisoformat(request["now"]))
    token = compared_by_launcher.set(True)
    module, function = _TRIAL.split(":")
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = project(MAIN, run_dir=folder)
            getattr(import_module(module), function)(trainer)
    except Exception as error:  # noqa: BLE001 - whatever ends the run is said by the run
        if is_out_of_memory(error):
            return _TOO_LARGE
        say(f"{type(error).__name__}: {error}".splitlines()[0])
        return _FAILS
    finally:
        compared_by_launcher.reset(token)
    return _FITS


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    end_with_parent()
    # The interpreter's teardown would wait for the other processes.
    end_promptly(_try_here(asked, lambda line: sys.stderr.write(f"{line}\n")))
