"""SLURM as the place where the trials of a sweep run: one job for each attempt.

The input is the arguments of `fgcli`; the output is jobs. Jobs go on when the process of the sweep ends, and are found
again by their numbers in the journal.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forgather.errors import ProjectError
from forgather.sweeps.slots import Command

_ASK_SECONDS = 5.0
_LIVE = frozenset(
    "PENDING RUNNING CONFIGURING COMPLETING SUSPENDED REQUEUED REQUEUE_HOLD RESIZING SIGNALING STAGE_OUT STOPPED "
    "SPECIAL_EXIT".split()
)
"""The states of a job that has not ended, by the manual of squeue."""
_FEW_ANSWERS = 3
"""The number of answers without a job after which it has ended: squeue forgets jobs, and may miss a new one."""


class SlurmSlots:
    """The jobs of a sweep.

    Args:
        number: how many jobs exist at once.
        options: the options of sbatch, such as `--partition=gpu --time=2:00:00`.
        folder: the folder for the scripts of the jobs.
        ask_seconds: the time between two questions to SLURM.

    Raises:
        ProjectError: FG565 if SLURM's commands are not found.
    """

    def __init__(self, number: int, options: Sequence[str], folder: str, ask_seconds: float = _ASK_SECONDS) -> None:
        self.number = number
        self._options = list(options)
        self._folder = folder
        self._ask_seconds = ask_seconds
        self._jobs: dict[int, int] = {}
        self._missed: dict[int, int] = {}
        self._asked = 0.0
        _answer(["sbatch", "--version"])

    def start(self, trial: int, command: Command, log: str) -> dict[str, int]:
        """Submits a job, and returns its number.

        Args:
            trial: the number of the trial.
            command: what it runs.
            log: the file that gets what it prints; it is appended to.

        Raises:
            ProjectError: FG565 if SLURM refuses the job.
        """
        os.makedirs(self._folder, exist_ok=True)
        script = os.path.join(self._folder, f"{trial:04d}.sh")
        with open(script, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(job_script(command, name=f"trial-{trial:04d}"))
        # Not a line of the script, which would end at a space; and a percent sign begins a pattern.
        output = f"--output={log.replace('%', '%%')}"
        answer = _answer(["sbatch", "--parsable", output, *self._options, script])
        number = answer.partition(";")[0].strip()
        if not number.isdecimal():
            raise ProjectError(
                f"sbatch answered {answer.strip()[:200]!r}, which is no number of a job",
                code="FG565",
                hint="see with squeue whether there is a job, cancel it, and go on with --resume",
            )
        self._jobs[trial] = int(number)
        return {"job": int(number)}

    def adopt(self, trial: int, handle: Any) -> bool:
        """Returns whether a job of an earlier process of the sweep still waits or runs.

        Raises:
            ProjectError: FG565 if SLURM does not say: a job that goes on must not be started again.
        """
        job = handle.get("job") if isinstance(handle, Mapping) else None
        if not isinstance(job, int):
            return False
        states = self._states([job])
        if states is None:
            raise ProjectError(
                f"squeue does not say whether job {job} of trial {trial} goes on",
                code="FG565",
                hint="go on with --resume when SLURM answers again",
            )
        if states.get(job, "") not in _LIVE:
            return False
        self._jobs[trial] = job
        return True

    def running(self) -> set[int]:
        """Returns the numbers of the trials whose jobs wait or run."""
        return set(self._jobs)

    def ended(self) -> Iterator[tuple[int, int | None]]:
        """Yields each trial whose job has ended; its exit status is unknown, and its run folder says how it ended."""
        if not self._jobs or time.monotonic() - self._asked < self._ask_seconds:
            return
        self._asked = time.monotonic()
        states = self._states(list(self._jobs.values()))
        if states is None:
            return  # SLURM may be down for hours, and jobs go on
        for trial, job in list(self._jobs.items()):
            is_known = job in states
            self._missed[job] = 0 if is_known else self._missed.get(job, 0) + 1
            if (is_known and states[job] not in _LIVE) or self._missed[job] >= _FEW_ANSWERS:
                del self._jobs[trial]
                yield trial, None

    def stop(self, trial: int) -> None:
        """Asks a trial to save its state and to end; a job that waits is removed."""
        if (job := self._jobs.get(trial)) is not None:
            pending = (self._states([job]) or {}).get(job) == "PENDING"
            _answer(["scancel", str(job)] if pending else ["scancel", "--signal=TERM", "--full", str(job)])

    def wind_down(self) -> None:
        """Does nothing, as `close`."""

    def close(self) -> None:
        """Does nothing: jobs go on, and the next process of the sweep finds them."""

    def _states(self, jobs: Sequence[int]) -> dict[int, str] | None:
        """Returns the state of each job that SLURM still knows; None if SLURM does not answer."""
        try:
            answer = _answer(["squeue", "--json", f"--jobs={','.join(map(str, jobs))}", "--states=all"])
        except ProjectError as error:
            # What squeue says about a single job that it has forgotten.
            return {} if "invalid job id" in error.message.lower() else None
        try:
            found = json.loads(answer)["jobs"] if answer.strip() else []
            # Since SLURM 23.11, the state is a list.
            return {
                int(job["job_id"]): state[0] if isinstance(state := job["job_state"], list) else str(state)
                for job in found
            }
        except (ValueError, LookupError, TypeError):
            return None


def job_script(command: Command, *, name: str) -> str:
    """Returns the script of a job.

    Args:
        command: what it runs.
        name: the name of the job.
    """
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={name}",
            "#SBATCH --open-mode=append",
            "#SBATCH --ntasks-per-node=1",
            "# Before the time limit, the run saves its state; the sweep submits it again.",
            "#SBATCH --signal=B:TERM@120",
            "#SBATCH --no-requeue",
            f"cd {shlex.quote(command.folder)}",
            f"exec {shlex.join([sys.executable, '-m', 'forgather', *command.words])}",
            "",
        ]
    )


def _answer(words: Sequence[str]) -> str:
    """Returns what a command of SLURM prints.

    Raises:
        ProjectError: FG565 if the command does not exist, or fails.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProjectError(
            f"{words[0]} cannot be called: {error.strerror if isinstance(error, OSError) else 'no answer in 60 s'}",
            code="FG565",
            hint="run the sweep on a machine of the cluster, or without --slurm",
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ProjectError(
            f"{shlex.join(words[:2])} failed: {said[-1] if said else f'exit status {done.returncode}'}",
            code="FG565",
            hint="correct the options of --slurm",
        )
    return done.stdout
