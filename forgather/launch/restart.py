"""Restarts of a failed or requeued run: whether processes are started again, and from which checkpoint they resume.

The inputs are the failure and the checkpoints of the output folder. The output is a decision, which is printed in one
line and passed to the new processes in an environment variable. A failure that would occur again is not retried. A
restarted run resumes from a checkpoint that the run itself wrote, not from a checkpoint of an earlier run in the same
folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.interrupt import current_handler
from forgather.launch.in_process import Outcome
from forgather.project.fault_tolerance import FaultTolerance

RESUME_VARIABLE = "FORGATHER_GOES_ON"
"""The environment variable whose value says whether a new attempt resumes from a checkpoint: "auto" or "no"."""


class RestartPolicy:
    """A callable that decides whether a failed run is started again; the launcher calls it before each new attempt.

    Args:
        output_dir: the folder of the run's checkpoints.
        auto_resume: True if a new attempt resumes from the newest checkpoint.
        resume: the value of `resume_from_checkpoint` for the first attempt: "auto", True, the path of a checkpoint, or
            None to start from the beginning.
        world_size: the number of processes, or None if it depends on the machines.
        say: a function that prints a line.
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
        # With `resume_from_checkpoint: auto`, the run continues the checkpoints that exist already, so a restart may
        # resume from them, too.
        self._earlier = 0 if resume in (True, "auto") else self._newest()[0]

    def __call__(self, failures: Sequence[Any], attempt: int, attempts: int) -> bool:
        """Returns True if the processes are to be started again, and prints the decision.

        Args:
            failures: the processes that failed; the root cause comes first.
            attempt: the number of the next attempt.
            attempts: the maximum number of attempts.
        """
        record = failures[0].record if failures else None
        # A run that was asked to stop did not fail.
        if record is not None and record.kind.name == "STOPPED":
            return False
        if record is not None and record.lasts:
            self._say(f"not tried again: {record.code} would end the next attempt, too")
            return False
        cause = import_module("forgather.ml.distributed.launcher").describe_failures(failures, self._world_size)
        serial, folder = self._newest()
        resumes = self._auto_resume and serial > self._earlier
        # The launcher starts the new processes with this environment.
        os.environ[RESUME_VARIABLE] = "auto" if resumes else "no"
        start = f"resuming from {folder}" if resumes else self._start_as_before()
        self._say(f"attempt {attempt} of {attempts}, after {cause}; {start}")
        return True

    def _start_as_before(self) -> str:
        if self._resume and self._newest()[0]:
            return f"starting as before, with resume_from_checkpoint: {self._resume}"
        if not self._auto_resume:
            return "starting from the beginning, because auto_resume is false"
        return "starting from the beginning: nothing was saved yet"

    def _newest(self) -> tuple[int, str]:
        """Returns the serial number and the step, as text, of the checkpoint that was written last.

        The serial number is 0 if there is no checkpoint.
        """
        serial, step = import_module("forgather.ml.checkpoint.lineage").last_written(self._output_dir)
        return serial, f"step {step}"


def resumes_after_restart(tolerance: FaultTolerance | None, environ: Mapping[str, str]) -> bool:
    """Returns True if the current process belongs to a restarted run that resumes from its newest checkpoint.

    A job that SLURM requeued resumes by default. A further attempt of torchrun resumes if the config has fault
    tolerance settings with `auto_resume`.

    Args:
        tolerance: the fault tolerance settings of the config, or None if the config has none.
        environ: the environment variables, including those of torchrun and SLURM and `FORGATHER_GOES_ON`.
    """
    if tolerance is not None and not tolerance.auto_resume:
        return False
    names = ["SLURM_RESTART_COUNT"] if tolerance is None else ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"]
    is_further = any(environ.get(name, "") not in ("", "0") for name in names)
    return is_further and environ.get(RESUME_VARIABLE, "auto") == "auto"


def requeue(outcome: Outcome, environ: Mapping[str, str], *, resumes: bool) -> str | None:
    """Requeues the current SLURM job, if SIGUSR1 ended the run.

    Args:
        outcome: the result of the run.
        environ: the environment variables, including those of SLURM.
        resumes: True if the run resumes from its checkpoint when it is started again.

    Returns:
        A line of text that says that the job is requeued or why it is not, or None if there is no job to requeue.
    """
    handler = current_handler()
    job = environ.get("SLURM_JOB_ID", "")
    if not (job and outcome.interrupted and handler is not None and handler.wants_requeue):
        return None
    # Requeuing a run that cannot resume would repeat the same steps until each time limit.
    if outcome.checkpoint is None and not outcome.nothing_trained:
        return f"job {job} is not requeued: nothing was saved, so it would start from the beginning"
    if not resumes:
        return f"job {job} is not requeued: it would start from the beginning each time, and never finish"
    program = shutil.which("scontrol")
    if program is None:
        return f"job {job} is not requeued: scontrol was not found"
    done = subprocess.run([program, "requeue", job], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())[:200]
        return f"job {job} is not requeued: scontrol failed: {reason or f'status {done.returncode}'}"
    return f"job {job} is requeued"
