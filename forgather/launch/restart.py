"""Whether the processes of a run that failed are started again, and what they go on from.

Takes what failed, and the checkpoints of the output folder; gives yes or no, in one line for people, and tells the new
processes through their environment. Keeps true: a mistake that the same run would make again is not repeated; a run
goes on from a checkpoint that it has written itself, and not from one of an earlier run in the same folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.interrupt import present
from forgather.launch.in_process import Outcome
from forgather.project.fault_tolerance import FaultTolerance

GOES_ON = "FORGATHER_GOES_ON"


class RestartPolicy:
    """Asked by the launcher before each new attempt.

    Args:
        output_dir: where checkpoints of the run lie.
        auto_resume: whether a new attempt goes on from the newest one.
        resume: what the run itself goes on from: "auto" or true, or a folder; nothing where it begins anew.
        world_size: processes in all; None where only the machines can tell.
        say: prints a line.
    """

    def __init__(
        self,
        output_dir: str,
        *,
        auto_resume: bool,
        world_size: int | None,
        say: Callable[[str], None],
        resume: object = None,
    ) -> None:
        self._output_dir = Path(output_dir)
        self._auto_resume = auto_resume
        self._world_size = world_size
        self._say = say
        self._resume = resume
        # What an earlier start of this very run has written is its own, too.
        self._earlier = 0 if resume in (True, "auto") else self._newest()[0]

    def __call__(self, failures: Sequence[Any], attempt: int, attempts: int) -> bool:
        """Tells whether to start again, and says so.

        Args:
            failures: processes that failed, the first one first.
            attempt: number of the attempt that would begin.
            attempts: how many there may be.
        """
        record = failures[0].record if failures else None
        if record is not None and record.kind.name == "STOPPED":
            return False
        if record is not None and record.lasts:
            self._say(f"not tried again: {record.code} would end the next attempt, too")
            return False
        cause = import_module("forgather.ml.distributed.launcher").in_a_line(failures, self._world_size)
        serial, folder = self._newest()
        goes_on = self._auto_resume and serial > self._earlier
        os.environ[GOES_ON] = "auto" if goes_on else "no"
        begins = f"going on from {folder}" if goes_on else self._begins_as_before()
        self._say(f"attempt {attempt} of {attempts}, after {cause}; {begins}")
        return True

    def _begins_as_before(self) -> str:
        if self._resume and self._newest()[0]:
            return f"beginning as before, with resume_from_checkpoint: {self._resume}"
        if not self._auto_resume:
            return "beginning anew, as auto_resume: false says"
        return "beginning anew: nothing of it is saved yet"

    def _newest(self) -> tuple[int, str]:
        """Returns the number and the step of the checkpoint that was written last; zero where there is none."""
        serial, step = import_module("forgather.ml.checkpoint.lineage").last_written(self._output_dir)
        return serial, f"step {step}"


def goes_on(tolerance: FaultTolerance | None, environ: Mapping[str, str]) -> bool:
    """Tells whether this process belongs to a run that was started again, and goes on from its newest checkpoint.

    A job that SLURM has queued again does so by itself; a further attempt under torchrun, where the config says so.

    Args:
        tolerance: of the config.
        environ: environment variables of torchrun and SLURM, and ours.
    """
    if tolerance is not None and not tolerance.auto_resume:
        return False
    names = ["SLURM_RESTART_COUNT"] if tolerance is None else ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"]
    is_further = any(environ.get(name, "") not in ("", "0") for name in names)
    return is_further and environ.get(GOES_ON, "auto") == "auto"


def requeued(outcome: Outcome, environ: Mapping[str, str], *, goes_on: bool) -> str | None:
    """Queues this job again where SIGUSR1 has ended its run; None where there is nothing to do.

    Args:
        outcome: of the run.
        environ: environment variables of SLURM.
        goes_on: whether the run goes on from what it has saved, once it is started again.

    Returns:
        What was done, or why not.
    """
    heard = present()
    job = environ.get("SLURM_JOB_ID", "")
    if not (job and outcome.interrupted and heard is not None and heard.wants_requeue):
        return None
    if outcome.checkpoint is None and not outcome.nothing_trained:
        return f"job {job} is not queued again: nothing was saved, and it would begin anew"
    if not goes_on:
        return f"job {job} is not queued again: it would begin anew each time, and never end"
    program = shutil.which("scontrol")
    if program is None:
        return f"job {job} is not queued again: there is no scontrol here"
    done = subprocess.run([program, "requeue", job], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())[:200]
        return f"job {job} is not queued again: scontrol says {reason or f'status {done.returncode}'}"
    return f"job {job} is queued again"
