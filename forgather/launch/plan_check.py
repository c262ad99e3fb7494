"""The comparison of a run with its device: a second process plans the memory of the run while the run starts.

`begin_plan_check` takes the words of an `fgcli plan` command and the device of the run; gives a `PlanCheck`, which says
in one line whether each process fits, and writes the plan into the run folder as `plan.json`. The report of the run and
`note_largest_row` read this file. The planning process sees no GPU, and a run waits for it only for a few seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forgather.launch.planning import Device, fit_on
from forgather.planner.memory_plan import PLAN_FILE, format_size

PATIENCE_SECONDS = 3.0
"""How long a run waits for its plan before it starts. The plan is printed later if it takes longer."""
_LAUNCHER_VARIABLES = re.compile(
    "RANK$|LOCAL_|WORLD_SIZE$|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI_|ACCELERATE_|FORGATHER_CHECKED$"
)


class PlanCheck:
    """A plan that another process computes.

    Args:
        command: the words of the command, which prints the plan as JSON.
        device: the device of each process.
        run_dir: the run folder.
        say: a function that prints one line.
    """

    def __init__(self, command: Sequence[str], device: Device, run_dir: str, say: Callable[[str], None]) -> None:
        self._device = device
        self._file = os.path.join(run_dir, PLAN_FILE)
        self._say = say
        self._process = subprocess.Popen(
            command,
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None) -> bool:
        """Waits for the plan, at most for a number of seconds (None: without a limit); returns whether it is there."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self) -> None:
        """Ends the planning process; a plan that is not there yet is dropped without a word."""
        self._say = lambda line: None
        if self._process.poll() is None:
            self._process.kill()
        self._thread.join()

    def _follow(self) -> None:
        written, errors = self._process.communicate()
        if self._process.returncode:
            lines = [line for line in errors.splitlines() if line.strip()]
            why = next((line for line in lines if line.startswith("error")), lines[-1] if lines else "it was ended")
            self._say(f"plan: skipped ({why.strip()})")
            return
        plan = json.loads(written)
        plan["fit"] = fit_on(plan, self._device)
        with contextlib.suppress(OSError):
            draft = f"{self._file}.draft"
            with open(draft, "w", encoding="utf-8") as stream:
                json.dump(plan, stream, indent=1)
            os.replace(draft, self._file)
        self._say(fit_line(plan["fit"]))


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
    ways = f"; to make it smaller: {rank['ways_out'][0]}" if rank["verdict"] != "fits" and rank["ways_out"] else ""
    return f"plan: {rank['verdict']}, {needs} of the {free} that are free on {device}{ways}"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a device had too little memory: `torch.OutOfMemoryError`, without importing torch."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return kind is not None and isinstance(error, kind)


def note_largest_row(error: BaseException, run_dir: str) -> None:
    """Adds a note to an out-of-memory error: the largest row of the run's plan, and three ways to a smaller run.

    Args:
        error: the error.
        run_dir: the run folder; without a plan in it, the note names the command that plans.
    """
    try:
        with open(os.path.join(run_dir, PLAN_FILE), encoding="utf-8") as stream:
            rank = max(json.load(stream)["fit"]["ranks"], key=lambda rank: rank["most"])
    except (OSError, ValueError, LookupError, TypeError):
        error.add_note("`fgcli plan` shows what the run holds on each device, and what makes it smaller")
        return
    peak = format_size(rank["peak_bytes"])
    planned = f"the plan of this run has a peak of {peak}, and its largest row is {rank['largest']}"
    error.add_note("\n".join([f"{planned}. Ways to a smaller run:", *(f"  {way}" for way in rank["ways_out"])]))


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if not _LAUNCHER_VARIABLES.match(name)}
    # A context on the GPU would take memory from the run, and the sizes of a plan do not depend on the device.
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
