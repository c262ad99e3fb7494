"""Where the trials of a sweep run: a number of places on this machine, each with its own devices.

The input is a command; the output is a process that ends with the sweep, whatever ends it. `Slots` is what a sweep
needs to know of any such place, so that a batch system can be another one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from forgather.errors import ProjectError
from forgather.launch.bound_process import BoundProcess
from forgather.launch.multi_process import children_environment

_SAVING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Command:
    """What a trial runs.

    Args:
        words: the arguments of `fgcli`.
        folder: the working folder.
    """

    words: Sequence[str]
    folder: str


class Slots(Protocol):
    """Places where trials run."""

    number: int
    """How many trials run at once."""

    def start(self, trial: int, command: Command, log: str) -> Any:
        """Starts a trial, and returns what identifies the attempt, as plain data."""

    def adopt(self, trial: int, handle: Any) -> bool:
        """Returns whether an attempt of an earlier process of the sweep goes on, which is now one of this process."""

    def running(self) -> set[int]:
        """Returns the numbers of the trials that are running."""

    def ended(self) -> Iterator[tuple[int, int | None]]:
        """Yields each trial that ended since the last call, with its exit status; None if it is unknown."""

    def stop(self, trial: int) -> None:
        """Asks a trial to save its state and to end."""

    def wind_down(self) -> None:
        """Lets what is running save its state before `close`."""

    def close(self) -> None:
        """Ends what is still running."""


@dataclass(slots=True)
class _Place:
    devices: str | None
    trial: int | None = None
    process: BoundProcess | None = None


class LocalSlots:
    """Places on this machine.

    Args:
        number: how many trials run at once.
        devices: the accelerators of each place, as for `--devices`; empty if trials share what there is.
        threads: the processor threads of each trial, or None to leave that to the environment.
    """

    def __init__(self, number: int, devices: Sequence[str] = (), threads: int | None = None) -> None:
        self.number = number
        self._places = [_Place(devices[at] if devices else None) for at in range(number)]
        self._threads = threads

    def start(self, trial: int, command: Command, log: str) -> int:
        """Starts a trial in a free place, and returns the number of its process.

        Args:
            trial: the number of the trial.
            command: what it runs.
            log: the file that gets what it prints; it is appended to.
        """
        place = next(place for place in self._places if place.process is None)
        environment = dict(os.environ)
        if place.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = place.devices
        if self._threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(self._threads))
        with open(log, "ab") as stream, children_environment():
            environment |= {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH") if name in os.environ}
            words = [sys.executable, "-m", "forgather", *command.words]
            output = stream.fileno()
            place.process = BoundProcess(words, env=environment, stdout=output, stderr=output, cwd=command.folder)
        place.trial = trial
        return place.process.pid

    def adopt(self, trial: int, handle: Any) -> bool:
        """Returns False: processes on this machine end with the sweep that started them."""
        return False

    def running(self) -> set[int]:
        """Returns the numbers of the trials that are running."""
        return {place.trial for place in self._places if place.process is not None and place.trial is not None}

    def ended(self) -> Iterator[tuple[int, int | None]]:
        """Yields each trial that ended since the last call, with its exit status, negative for a signal."""
        for place in self._places:
            if place.process is not None and place.trial is not None and (status := place.process.poll()) is not None:
                # Its data workers may live on.
                place.process.end()
                trial, place.process, place.trial = place.trial, None, None
                yield trial, status

    def stop(self, trial: int) -> None:
        """Asks a trial to save its state and to end."""
        for place in self._places:
            if place.trial == trial and place.process is not None:
                with suppress(ProcessLookupError):
                    place.process.terminate()

    def wind_down(self) -> None:
        """Asks all trials to save their state and to end, and waits for them for a minute."""
        for trial in self.running():
            self.stop(trial)
        until = time.monotonic() + _SAVING_SECONDS
        processes = [place.process for place in self._places if place.process is not None]
        while time.monotonic() < until and any(process.poll() is None for process in processes):
            time.sleep(0.1)

    def close(self) -> None:
        """Ends what is still running."""
        for place in self._places:
            if place.process is not None:
                place.process.end()
                place.process = None


def local_slots(number: int | None, each: int | None) -> LocalSlots:
    """Returns the places of this machine: groups of its accelerators, or shares of its processors.

    Args:
        number: how many trials run at once; None for as many as the accelerators allow, or one without them.
        each: the accelerators of one trial; None for all.

    Raises:
        ProjectError: FG565 if there are too few accelerators.
    """
    count = import_module("forgather.ml.distributed.launcher").count_devices()
    visible = visible_devices(os.environ, count)
    if visible:
        devices = dealt_devices(visible, max(each or len(visible), 1), number)
        return LocalSlots(len(devices), devices)
    wanted = number or 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return LocalSlots(wanted, threads=max(1, processors // wanted) if wanted > 1 else None)


def dealt_devices(visible: Sequence[str], each: int, number: int | None) -> list[str]:
    """Returns the devices of each place.

    Args:
        visible: the accelerators of this machine.
        each: the accelerators that one trial takes.
        number: the number of places, or None for as many as the accelerators allow.

    Raises:
        ProjectError: FG565 if there are too few accelerators.

    Example:
        >>> dealt_devices(["0", "1", "2", "3"], 2, None)
        ['0,1', '2,3']
    """
    most = len(visible) // each
    wanted = most if number is None else number
    if wanted > most or most == 0:
        raise ProjectError(
            f"{max(wanted, 1)} trials at once need {max(wanted, 1) * each} accelerators, and there are {len(visible)}",
            code="FG565",
            hint=f"--slots {most}" if most else "run it on a machine with more of them, or change the config",
        )
    return [",".join(visible[at * each : (at + 1) * each]) for at in range(wanted)]


def visible_devices(environ: Mapping[str, str], count: int) -> list[str]:
    """Returns the names of the accelerators that this process may use.

    Args:
        environ: the environment variables.
        count: the number of accelerators that torch sees.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(at) for at in range(count)]
    return [word.strip() for word in named.split(",") if word.strip()][:count]
