"""The loop of a sweep: starts trials, watches them, ends bad ones early, and starts killed ones again.

The input is a journal, the trials and slots; the output is the journal with an end for each trial. Everything that the
loop knows is in the journal or in run folders, so another process can go on at any moment.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field

from forgather.errors import ControlError, ProjectError
from forgather.interrupt import current_handler
from forgather.interventions import read_interventions
from forgather.run_control import Action
from forgather.run_status import RunStatus, Status
from forgather.runs.run_folders import TRIALS
from forgather.sweeps.journal import Journal, Outcome, TrialHistory
from forgather.sweeps.progress import TrialProgress
from forgather.sweeps.slots import Command, Slots
from forgather.sweeps.spec import SweepSpec
from forgather.sweeps.stopping import ends_early, start_order

LOG = "output.log"
MOST_ATTEMPTS = 3
"""The number of attempts without a new step after which a killed trial has failed."""
_POLL_SECONDS, _ENDING_SECONDS = 0.2, 30.0
_LEAST_FREE = 1 << 16
"""In bytes. A disk with less room is full: a run folder takes more."""
_MOST_LOG_BYTES = 1 << 16
_TERMINATED = (130, 143)
"""The exit statuses of a run that was asked to end."""


def trial_folder(folder: str, number: int) -> str:
    """Returns the output folder of a trial.

    Args:
        folder: the sweep folder.
        number: the number of the trial.
    """
    return os.path.join(folder, TRIALS, f"{number:04d}")


@dataclass(kw_only=True)
class Sweep:
    """A sweep that runs.

    Args:
        journal: its journal.
        spec: what it is to do.
        slots: where trials run.
        next_trial: a function that announces a further trial in the journal and returns its number, or None if there is
            none now.
        command: a function that returns what a trial runs, given whether it was started before.
        changed: a function that is called after each change of the journal and each reading of the metrics.
    """

    journal: Journal
    spec: SweepSpec
    slots: Slots
    next_trial: Callable[[], int | None]
    command: Callable[[TrialHistory, bool], Command]
    changed: Callable[[], None] = lambda: None
    progress: dict[int, TrialProgress] = field(default_factory=dict)
    stopping: dict[int, str] = field(default_factory=dict)

    def run(self) -> None:
        """Runs trials until each has ended.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM, when the running trials have saved their state and ended, or at
                once after a second one.
            ProjectError: FG563 if the journal cannot be written, or the disk is full; the running trials have ended.
        """
        self.take_over()
        handler = current_handler()
        try:
            while self.fill() or self.slots.running():
                time.sleep(_POLL_SECONDS)
                self.collect()
                if handler is not None and handler.requested:
                    raise handler.error
        except KeyboardInterrupt:
            self._interrupt()
            raise
        except ProjectError:
            # The trials that run are sound, and save their state.
            self.slots.wind_down()
            raise
        finally:
            if handler is not None:
                handler.defers = False
            self.slots.close()

    def take_over(self) -> None:
        """Reads what earlier processes of the sweep left: trials that go on, and trials that ended without a record."""
        for number, trial in list(self.journal.history.trials.items()):
            progress = self._progress(number)
            if trial.attempts and trial.outcome is None and not self.slots.adopt(number, trial.handle):
                _wait_for_end(trial, progress)
                progress.update()
                self._record_end(number, None, with_sweep=True)
            progress.update()
        # A trial that was to end early, and whose sweep was killed before, is not started again.
        for number, why in self._early_ends(set(self.journal.history.trials) - self.slots.running()):
            if self.journal.history.trials[number].attempts and not self.journal.history.trials[number].is_done:
                self.journal.ended(number, Outcome.STOPPED, step=self._progress(number).step, cause=why)

    def fill(self) -> bool:
        """Starts trials in the free slots; returns whether one was started."""
        started = False
        self.journal.refresh()
        while len(self.slots.running()) < self.slots.number and (number := self._next()) is not None:
            self._start(number)
            started = True
        return started

    def collect(self) -> None:
        """Records the trials that have ended, reads metrics, and ends trials early."""
        for number, status in list(self.slots.ended()):
            self._progress(number).update()
            self._record_end(number, status)
        for number in self.slots.running():
            self._progress(number).update()
        for number, why in self._early_ends(self.slots.running() - self.stopping.keys()):
            self.stopping[number] = why
            self.slots.stop(number)
        self.changed()

    def _early_ends(self, numbers: Set[int]) -> Iterator[tuple[int, str]]:
        """Yields those of some trials that should end early, with the reason."""
        if self.spec.early is None:
            return
        curves = {number: progress.curve for number, progress in self.progress.items() if progress.curve}
        for number in sorted(numbers):
            why = ends_early(self.spec.early, self.spec.goal, curves, number)
            if why is not None:
                yield number, why

    def _next(self) -> int | None:
        trials = self.journal.history.trials
        for number in start_order(self.spec, trials):
            if not trials[number].is_done and number not in self.slots.running():
                return number
        return self.next_trial()

    def _start(self, number: int) -> None:
        trial = self.journal.history.trials[number]
        folder = trial_folder(self.journal.folder, number)
        command = self.command(trial, trial.attempts > 0)
        run_dir = self._progress(number).run_dir
        earlier_run = None if run_dir is None else os.path.basename(run_dir)
        # The record comes first: a trial that runs is never unknown to the process that goes on.
        if not self.journal.started(number, trial.attempts + 1, None, earlier_run=earlier_run):
            return
        if (handler := current_handler()) is not None:
            # From now on, the first signal is only recorded: trials need their time to save.
            handler.begin()
        try:
            os.makedirs(folder, exist_ok=True)
            if not os.path.isdir(command.folder):
                cause = f"its working folder does not exist any more: {command.folder}"
                self.journal.ended(number, Outcome.FAILED, step=None, cause=cause)
                return
            handle = self.slots.start(number, command, os.path.join(folder, LOG))
        except OSError as error:
            # The trial is as good as before: it is started when the sweep goes on.
            raise ProjectError(
                f"trial {number} cannot be started in {folder!r}: {error.strerror or error}",
                code="FG563",
                hint="free some space, or change the permissions of the folder; then go on, as after a kill",
            ) from None
        if handle is not None:
            self.journal.started(number, trial.attempts + 1, handle, earlier_run=earlier_run)
        self.changed()

    def _record_end(self, number: int, status: int | None, *, with_sweep: bool = False) -> None:
        """Records the end of an attempt. One that ended with its sweep was not killed for a reason of its own."""
        trial, progress = self.journal.history.trials[number], self._progress(number)
        outcome, cause = self._outcome(number, status, _status_of_attempt(trial, progress))
        is_full = outcome is Outcome.FAILED and _is_full(self.journal.folder, cause, now=not with_sweep)
        if is_full or (outcome is Outcome.KILLED and with_sweep):
            outcome = Outcome.INTERRUPTED
        if outcome is Outcome.KILLED and _makes_no_progress(trial, progress.step):
            outcome = Outcome.FAILED
            cause = f"its process was killed {MOST_ATTEMPTS} times at the same step"
        self.stopping.pop(number, None)
        self.journal.ended(number, outcome, step=progress.step, cause=cause)
        self.changed()
        if is_full and not with_sweep:
            # Otherwise every trial that is left would fail for the same reason, and none would be started again.
            raise ProjectError(
                f"trial {number} ended because the disk is full: {cause}",
                code="FG563",
                hint="free some space, and go on: the trial is started again",
            )

    def _outcome(self, number: int, status: int | None, found: RunStatus | None) -> tuple[Outcome, str]:
        """Returns how an attempt ended, by the exit status and what its run folder says."""
        said = None if found is None else found.status
        if said is Status.FINISHED or (said is None and status == 0):
            return Outcome.FINISHED, ""
        if said is Status.INTERRUPTED or status in _TERMINATED:
            why = self.stopping.get(number) or _stop_of_user(self._progress(number))
            return (Outcome.INTERRUPTED, "") if why is None else (Outcome.STOPPED, why)
        if said is Status.FAILED or (status is not None and status > 0):
            cause = (found.cause or {}).get("message") if found is not None else None
            return Outcome.FAILED, str(cause or _last_line(trial_folder(self.journal.folder, number)))
        return Outcome.KILLED, ""

    def _interrupt(self) -> None:
        """Asks the running trials to save their state and to end, and waits for them."""
        for number in self.slots.running():
            self.slots.stop(number)
        while self.slots.running():
            for number, status in list(self.slots.ended()):
                self._progress(number).update()
                # The signal may have ended a process that had not begun to train.
                self._record_end(number, status, with_sweep=True)
            time.sleep(_POLL_SECONDS)

    def _progress(self, number: int) -> TrialProgress:
        if number not in self.progress:
            self.progress[number] = TrialProgress(trial_folder(self.journal.folder, number), self.spec.metric)
        return self.progress[number]


def _status_of_attempt(trial: TrialHistory, progress: TrialProgress) -> RunStatus | None:
    """Returns the status of the run of the last attempt; None if it ended before it had a run folder."""
    run_dir = progress.run_dir
    is_earlier = run_dir is None or os.path.basename(run_dir) == trial.earlier_run
    return None if is_earlier else progress.status()


def _stop_of_user(progress: TrialProgress) -> str | None:
    """Returns why a trial ended, if a user has asked its newest run to stop; otherwise None."""
    with suppress(ControlError):
        run_dir = progress.run_dir
        if run_dir is not None and any(one.action is Action.STOP for one in read_interventions(run_dir)):
            return "stopped by 'fgcli control'"
    return None


def _wait_for_end(trial: TrialHistory, progress: TrialProgress) -> None:
    """Waits for a run of a killed sweep, which ends with it, but not at the same moment."""
    until = time.monotonic() + _ENDING_SECONDS
    while (found := _status_of_attempt(trial, progress)) is not None and found.is_here and found.status.is_live:
        if time.monotonic() > until:
            run_dir = progress.run_dir
            raise ProjectError(
                f"a run of this sweep still goes on: process {found.pid}, in {run_dir}",
                code="FG564",
                hint=f"wait until it has ended, or end it: kill {found.pid}",
            )
        time.sleep(_POLL_SECONDS)


def _is_full(folder: str, cause: str, *, now: bool) -> bool:
    """Returns whether a trial failed because there was no room on the disk.

    Args:
        folder: the sweep folder.
        cause: why the trial failed.
        now: whether it has failed just now, so that the room on the disk says something about it.
    """
    if any(os.strerror(number) in cause for number in (errno.ENOSPC, errno.EDQUOT)):
        return True
    # A trial that cannot write a line of its log does not say why.
    facts = os.statvfs(folder)
    return now and facts.f_bavail * facts.f_frsize < _LEAST_FREE


def _makes_no_progress(trial: TrialHistory, step: int | None) -> bool:
    """Returns whether the last attempts, with the one that just ended, were all killed at one step."""
    steps = (*trial.kills, step or 0)[-MOST_ATTEMPTS:]
    return len(steps) == MOST_ATTEMPTS and len(set(steps)) == 1


def _last_line(folder: str) -> str:
    """Returns the last line with an error at the end of what a trial printed, or its last line."""
    try:
        with open(os.path.join(folder, LOG), "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _MOST_LOG_BYTES))
            text = stream.read(_MOST_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line for line in lines if line.startswith("error")] or lines
    return found[-1][:300] if found else "it ended without a message"
