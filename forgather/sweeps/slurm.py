"""SLURM as the place where the trials of a sweep run: one job for each attempt.

The input is the arguments of `fgcli`; the output is jobs. Jobs go on when the process of the sweep ends, and are found
again by their numbers in the journal, or by their names if the process ended before it could record the number. While
SLURM gives no answer, each job counts as one that goes on: a second job for the same trial would write into its folder.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from forgather.cache_file import digest_of
from forgather.errors import ProjectError
from forgather.sweeps.slots import Command

_ASK_SECONDS = 5.0
_LIVE = frozenset(
    "PENDING RUNNING CONFIGURING COMPLETING SUSPENDED REQUEUED REQUEUE_HOLD RESIZING SIGNALING STAGE_OUT STOPPED "
    "SPECIAL_EXIT".split()
)
"""The states of a job that has not ended, by the manual of squeue."""
_FORGOTTEN = "Invalid job id"
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
        if (answer := _asked(["sbatch", "--version"])).returncode:
            raise _refused("sbatch", answer)

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
            stream.write(job_script(command))
        # Here and not in the script, where blanks would end the path. A percent sign begins a placeholder.
        own = [f"--job-name={self._name(trial)}", f"--output={log.replace('%', '%%')}", "--open-mode=append"]
        try:
            answer = _asked(["sbatch", "--parsable", *self._options, *own, script])
        except subprocess.TimeoutExpired:
            hint = "--resume finds the job if it was submitted nevertheless"
            raise ProjectError("sbatch gave no answer in a minute", code="FG565", hint=hint) from None
        if answer.returncode:
            raise _refused("sbatch", answer)
        number = answer.stdout.partition(";")[0].strip()
        if not number.isdecimal():
            raise ProjectError(
                f"sbatch answered {answer.stdout.strip()[:200]!r}, which is no number of a job",
                code="FG565",
                hint="see with squeue whether there is a job, cancel it, and go on with --resume",
            )
        self._jobs[trial] = int(number)
        return {"job": int(number)}

    def _name(self, trial: int) -> str:
        """Returns the name of the jobs of a trial, which no other trial and no other sweep has."""
        return f"trial-{trial:04d}-{digest_of(os.fsencode(self._folder))[:12]}"

    def adopt(self, trial: int, handle: Any) -> bool:
        """Returns whether a job of an earlier process of the sweep still waits or runs.

        Raises:
            ProjectError: FG565 if SLURM does not say it.
        """
        job = handle.get("job") if isinstance(handle, Mapping) else None
        # The process may have ended between the start of a job and the record of its number.
        of_trial = f"--name={self._name(trial)}" if job is None else f"--jobs={job}"
        states = self._states(of_trial)
        if states is None:
            raise ProjectError(
                f"squeue does not say whether the job of trial {trial} still runs",
                code="FG565",
                hint="try again when SLURM answers: a second job for this trial would write into its folder",
            )
        live = [number for number, state in states.items() if state in _LIVE]
        if live:
            self._jobs[trial] = max(live)
        return bool(live)

    def running(self) -> set[int]:
        """Returns the numbers of the trials whose jobs wait or run."""
        return set(self._jobs)

    def ended(self) -> Iterator[tuple[int, int | None]]:
        """Yields each trial whose job has ended; its exit status is unknown, and its run folder says how it ended."""
        if not self._jobs or time.monotonic() - self._asked < self._ask_seconds:
            return
        self._asked = time.monotonic()
        states = self._states(f"--jobs={','.join(map(str, self._jobs.values()))}")
        if states is None:
            return
        for trial, job in list(self._jobs.items()):
            is_known = job in states
            self._missed[job] = 0 if is_known else self._missed.get(job, 0) + 1
            if (is_known and states[job] not in _LIVE) or self._missed[job] >= _FEW_ANSWERS:
                del self._jobs[trial]
                yield trial, None

    def stop(self, trial: int) -> None:
        """Asks a trial to save its state and to end; a job that waits is removed."""
        if (job := self._jobs.get(trial)) is not None:
            pending = (self._states(f"--jobs={job}") or {}).get(job) == "PENDING"
            # A job that has just ended is no longer known, which is no error of the sweep.
            with suppress(subprocess.TimeoutExpired):
                _asked(["scancel", str(job)] if pending else ["scancel", "--signal=TERM", "--full", str(job)])

    def wind_down(self) -> None:
        """Does nothing, as `close`."""

    def close(self) -> None:
        """Does nothing: jobs go on, and the next process of the sweep finds them."""

    def _states(self, which: str) -> dict[int, str] | None:
        """Returns the state of each job that SLURM still knows; None if it gives no answer.

        Args:
            which: the option of squeue that names the jobs.
        """
        try:
            answer = _asked(["squeue", "--json", which, "--states=all"])
        except subprocess.TimeoutExpired:
            return None
        if answer.returncode:
            # It says so of a single job that it has forgotten, and fails for other reasons if it is not reached.
            return {} if _FORGOTTEN in answer.stderr else None
        try:
            # Since SLURM 23.11, the state is a list.
            return {
                int(job["job_id"]): state[0] if isinstance(state := job["job_state"], list) else str(state)
                for job in json.loads(answer.stdout)["jobs"]
            }
        except (ValueError, LookupError, TypeError):
            return None


def job_script(command: Command) -> str:
    """Returns the script of a job.

    Args:
        command: what it runs.
    """
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "#SBATCH --ntasks-per-node=1",
            "# Before the time limit, the run saves its state; the sweep submits it again.",
            "#SBATCH --signal=B:TERM@120",
            "#SBATCH --no-requeue",
            f"cd {shlex.quote(command.folder)}",
            f"exec {shlex.join([sys.executable, '-m', 'forgather', *command.words])}",
            "",
        ]
    )


def _asked(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Calls a command of SLURM, and returns what it printed.

    Raises:
        ProjectError: FG565 if the command does not exist.
        TimeoutExpired: if it does not end in a minute.
    """
    try:
        return subprocess.run(words, capture_output=True, text=True, errors="replace", check=False, timeout=60)
    except OSError as error:
        raise ProjectError(
            f"{words[0]} cannot be called: {error.strerror}",
            code="FG565",
            hint="run the sweep on a machine of the cluster, or without --slurm",
        ) from None


def _refused(program: str, answer: subprocess.CompletedProcess[str]) -> ProjectError:
    said = (answer.stderr or answer.stdout).strip().splitlines()
    return ProjectError(
        f"{program} failed: {said[-1] if said else f'exit status {answer.returncode}'}",
        code="FG565",
        hint="correct the options of --slurm",
    )
