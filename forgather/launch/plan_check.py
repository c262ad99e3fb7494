"""The comparison of a run with its device: a second process plans the memory of the run while the run starts.

`begin_plan_check` takes the words of an `fgcli plan` command and the device of the run; gives a `PlanCheck`, which says
in one line whether each process fits, and writes the plan into the run folder as `plan.json`. If a process does not
fit, ways out are planned next. The report of the run and `note_largest_row` read this file. The planning process sees
no GPU, and a run waits for it only for a few seconds.

The ways out of a run are planned once, and are then in `plan.json`: by the check if the plan does not fit, otherwise by
the first process that lacks memory. Other processes wait for them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from forgather.launch.bound_process import BoundProcess
from forgather.launch.planning import Device, fit_on
from forgather.planner.fit import surely_fits
from forgather.planner.memory_plan import PLAN_FILE, format_size
from forgather.planner.ways_out import way_lines

PATIENCE_SECONDS = 3.0
"""How long a run waits for its plan before it starts. The plan is printed later if it takes longer."""
WAYS_SECONDS = 60.0
"""How long a run that had too little memory waits for its plan and its ways out before it ends."""
_POLL_SECONDS = 0.1
_LAUNCHER_VARIABLES = re.compile(
    "RANK$|LOCAL_|WORLD_SIZE$|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI_|ACCELERATE_|FORGATHER_CHECKED$"
)


class PlanCheck:
    """A plan that another process computes.

    Args:
        command: the words of the command, which prints the plan as JSON; words that ask for ways out are added.
        device: the device of each process.
        run_dir: the run folder.
        say: a function that prints one line.
    """

    def __init__(self, command: Sequence[str], device: Device, run_dir: str, say: Callable[[str], None]) -> None:
        self._device = device
        self._file = os.path.join(run_dir, PLAN_FILE)
        self._say = say
        self._command = [*command]
        self._is_said = threading.Event()
        # Held while a process is started, so that none is started after the end.
        self._starting = threading.Lock()
        self._has_ended = False
        self._process = _start([*command, "--no-ways-out"])
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None) -> bool:
        """Waits for the line, at most for a number of seconds (None: without a limit); returns whether it is said."""
        return self._is_said.wait(seconds)

    def wait_for_ways(self, seconds: float) -> None:
        """Waits until ways out are planned if the run does not fit, at most for a number of seconds."""
        self._thread.join(seconds)

    def end(self) -> None:
        """Ends the planning process; a plan that is not there yet is dropped without a word."""
        self._say = lambda line: None
        with self._starting:
            self._has_ended = True
            if isinstance(self._process, BoundProcess):
                self._process.end()
        self._thread.join()

    def _follow(self) -> None:
        try:
            plan, why = _answer(self._process)
            if plan:
                plan |= {"fit": fit_on(plan, self._device), "command": self._command}
                self._write(plan)
            self._say(fit_line(plan["fit"]) if plan else f"plan: skipped ({why})")
        finally:
            self._is_said.set()
        if plan and not surely_fits(plan["fit"]):
            self._plan_ways(plan)

    def _plan_ways(self, plan: dict[str, Any]) -> None:
        free = (self._device.hardware.memory_bytes or 0) - self._device.held_bytes
        with self._starting:
            if self._has_ended:
                return
            self._process = _start([*self._command, *_free_words(free)])
        ways, why = _planned_ways(self._process)
        if self._has_ended:
            return
        # Also if there are none: other processes wait for the answer.
        self._write(_with_ways(plan, ways))
        if why:
            self._say(f"plan: no ways out are known ({why})")
        elif lines := way_lines(ways):
            self._say(f"plan: the nearest way out is {lines[0]}:{lines[1]}")

    def _write(self, plan: Mapping[str, Any]) -> None:
        try:
            _write_plan(self._file, plan)
        except OSError as error:
            self._say(f"plan: not stored in the run folder ({error})")


def _start(command: Sequence[str]) -> BoundProcess | Exception:
    """Returns the process of a command, or why it cannot be started, such as without memory for another process."""
    try:
        return BoundProcess(command, env=_environment(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except (OSError, MemoryError) as error:
        return error


def _answer(process: BoundProcess | Exception, seconds: float | None = None) -> tuple[dict[str, Any], str]:
    """Returns the plan that a process prints, and why there is none if it fails or takes too long."""
    if isinstance(process, Exception):
        return {}, f"planning could not be started: {process}"
    # Its pipes are closed at the end, and not read to their end: a process that it started may hold them open.
    with process:
        try:
            written, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return {}, f"planning took longer than {seconds:.0f} s"
        finally:
            process.end()
    with suppress(ValueError):
        # The status of a plan that does not fit is that of a failure, and a failure prints no plan.
        if isinstance(plan := json.loads(written), dict) and "ranks" in plan:
            return plan, ""
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        why = next((line for line in lines if line.startswith("error")), lines[-1] if lines else "it was ended")
        return {}, why.strip()
    return {}, f"its output is no plan: {written[:80]!r}"


def _planned_ways(process: BoundProcess | Exception, seconds: float | None = None) -> tuple[list[dict[str, Any]], str]:
    """Returns the ways out that a process prints, and why there are none if it fails or takes too long."""
    plan, why = _answer(process, seconds)
    return (plan["fit"].get("ways_out", []), "") if plan else ([], why)


def _with_ways(plan: Mapping[str, Any], ways: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {**plan, "fit": {**plan["fit"], "ways_out": [*ways]}}


def _write_plan(file: str, plan: Mapping[str, Any]) -> None:
    draft = f"{file}.draft"
    with open(draft, "w", encoding="utf-8") as stream:
        json.dump(plan, stream, indent=1)
    os.replace(draft, file)


def _free_words(free: int) -> list[str]:
    # A float has each number of bytes that a device may have exactly.
    return ["--free", f"{free / 1024!r}KiB"]


def begin_plan_check(words: Sequence[str], device: Device, run_dir: str, say: Callable[[str], None]) -> PlanCheck:
    """Starts to plan a run, and returns the check.

    Args:
        words: the words of an `fgcli plan --json` command, without the program name.
        device: the device of each process.
        run_dir: the run folder.
        say: a function that prints one line, called by another thread.
    """
    return PlanCheck([sys.executable, "-m", "forgather", *words], device, run_dir, say)


def fit_line(fit: Mapping[str, Any]) -> str:
    """Returns one line that says whether the rank with the largest peak fits."""
    device = fit["hardware"]["title"]
    if not fit["ranks"]:
        return f"plan: the memory of {device} is unknown"
    rank = max(fit["ranks"], key=lambda rank: rank["most"])
    least, most, free = (format_size(rank[name]) for name in ("least", "most", "available"))
    needs = most if least == most else f"{least} to {most}"
    return f"plan: {rank['verdict']}, {needs} of the {free} that are free on {device}"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a device or the host had too little memory, without importing torch."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    words = ("CUDA error: out of memory", "HIP error: out of memory", "DefaultCPUAllocator: can't allocate memory")
    return isinstance(error, (kind, MemoryError)) or any(word in str(error) for word in words)


def note_largest_row(
    error: BaseException,
    run_dir: str,
    *,
    command: Sequence[str],
    patience: float,
    seconds: float,
    is_first: Callable[[], bool],
) -> None:
    """Adds a note to an out-of-memory error: the largest row of the run's plan, and the nearest ways out, each planned.

    Args:
        error: the error.
        run_dir: the run folder; without a plan in it, the note names the command that plans.
        command: the words of the `fgcli plan` command of the run.
        patience: how many seconds to wait for the plan of the main process.
        seconds: how many seconds to wait for ways out, from the same instant.
        is_first: a function that returns true in the first process of the run that calls it, and false in the others.
    """
    began = time.monotonic()
    file = os.path.join(run_dir, PLAN_FILE)
    typed = shlex.join(["fgcli", *command])
    plan = _awaited(lambda: _read_plan(file), began + patience)
    if plan is None or not plan["fit"]["ranks"]:
        error.add_note(f"there is no plan of this run. What it holds, and changes with which it fits: {typed}")
        return
    rank = max(plan["fit"]["ranks"], key=lambda rank: rank["most"])
    peak, row = format_size(rank["peak_bytes"]), format_size(rank["largest_bytes"])
    first = f"the plan of this run has a peak of {peak}, and its largest row is {rank['largest']}, {row}"
    ways = way_lines(_ways_after(file, plan, rank, until=began + seconds, is_first=is_first))
    if not ways:
        error.add_note(f"{first}. Changes that make it smaller: {typed}")
        return
    error.add_note(f"{first}. The nearest ways out, each planned:")
    # Of a note, two lines are printed.
    for way, words in zip(ways[::2], ways[1::2], strict=True):
        error.add_note(f"{way}\n{words}")


def _ways_after(
    file: str, plan: Mapping[str, Any], rank: Mapping[str, Any], *, until: float, is_first: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Returns the ways out of a run that had too little memory; empty if none are planned in time.

    What is planned to fit but did not needs a way with less than the least that was planned.
    """
    seconds = until - time.monotonic()
    if "ways_out" not in plan["fit"] and surely_fits(plan["fit"]) and seconds > 0 and is_first():
        words = _free_words(min(rank["available"], rank["least"] - 1))
        ways, _ = _planned_ways(_start([*plan["command"], *words]), seconds)
        # Other processes wait for them, and then have none.
        with suppress(OSError):
            _write_plan(file, _with_ways(plan, ways))
        return ways
    return _awaited(lambda: (_read_plan(file) or plan)["fit"].get("ways_out"), until) or []


def _read_plan(file: str) -> dict[str, Any] | None:
    """Returns the plan in a file; None if there is none, or if the file is damaged."""
    try:
        with open(file, encoding="utf-8") as stream:
            plan = json.load(stream)
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, dict) and plan.get("fit") else None


def _awaited(read: Callable[[], Any], until: float) -> Any:
    """Returns what a function reads as soon as it is there; None if it is not there at an instant."""
    while (value := read()) is None and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return value


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if not _LAUNCHER_VARIABLES.match(name)}
    # A context on the GPU would take memory from the run, and the sizes of a plan do not depend on the device.
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
