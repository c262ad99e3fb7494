"""The journal of a sweep: an append-only file that says what was started, so that a killed sweep goes on.

The input is a sweep folder; the output is the `History` of its trials. A record is written and synced before what it
announces happens, so a trial that runs is always in the journal. How a trial ended is not taken from the journal alone:
its run folder says so, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from forgather.bounded import MAX_RECORD_BYTES, read_bytes
from forgather.errors import ProjectError
from forgather.folder_lock import folder_lock
from forgather.runs.run_folders import JOURNAL

LOCK = ".lock"
FORM = 1
"""The number of the journal's format."""


class Outcome(StrEnum):
    """How a trial, or one attempt at it, ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """The sweep ended it early."""
    FAILED = "failed"
    KILLED = "killed"
    """Its process ended without saying why; it is started again."""
    INTERRUPTED = "interrupted"
    """The sweep itself was interrupted or killed; the trial is started again when the sweep goes on."""

    @property
    def is_final(self) -> bool:
        """Whether the trial is not started again."""
        return self in (Outcome.FINISHED, Outcome.STOPPED, Outcome.FAILED)


@dataclass(frozen=True, kw_only=True)
class TrialHistory:
    """What the journal says about one trial.

    Args:
        number: the number of the trial.
        values: the value of each parameter as YAML text, by its path.
        skipped: why it is not run; None if it is.
        same_as: the number of the earlier trial that builds the same objects, if that is why; else None.
        attempts: the number of times that it was started.
        handle: what identifies the running attempt for its slots, such as the number of a job; None if none runs.
        earlier_run: the name of the newest run folder before the last attempt, or None. A run folder of this name says
            nothing about the attempt.
        outcome: how the last attempt ended; None if it did not.
        ends: the number of attempts that ended.
        kills: the last step of each attempt whose process was killed while the sweep went on.
        cause: why it failed; "" if it did not.
    """

    number: int
    values: Mapping[str, str]
    skipped: str | None = None
    same_as: int | None = None
    attempts: int = 0
    handle: Any = None
    earlier_run: str | None = None
    outcome: Outcome | None = None
    ends: int = 0
    kills: tuple[int, ...] = ()
    cause: str = ""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.skipped is not None or (self.outcome is not None and self.outcome.is_final)


@dataclass(slots=True)
class History:
    """The content of a journal.

    Args:
        sweep: the first record: the config, the overrides and what the sweep is to do.
        trials: what is known of each trial, by its number.
    """

    sweep: Mapping[str, Any]
    trials: dict[int, TrialHistory] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        """Adds a record.

        Raises:
            LookupError: if the record is of a trial that no earlier record announces, or incomplete.
            TypeError: if a value is of another type.
        """
        event, number = record["event"], record["trial"]
        if event == "trial":
            values = record["values"]
            if type(number) is not int or not isinstance(values, dict) or not all(map(_is_text, values.values())):
                raise TypeError
            facts: dict[str, Any] = {name: record.get(name) for name in ("skipped", "same_as")}
            self.trials[number] = TrialHistory(number=number, values=values, **facts)
            return
        known = self.trials[number]
        if event == "start":
            if type(record["attempt"]) is not int:
                raise TypeError
            facts = {name: record.get(name) for name in ("handle", "earlier_run")}
            self.trials[number] = replace(known, attempts=record["attempt"], **facts, outcome=None)
        else:
            outcome = Outcome(record["outcome"])
            kills = (*known.kills, record.get("step") or 0) if outcome is Outcome.KILLED else known.kills
            known = replace(known, handle=None, outcome=outcome, ends=known.ends + 1, kills=kills)
            self.trials[number] = replace(known, cause=record.get("cause") or "")


class Journal:
    """The journal in a sweep folder, opened for appending.

    Args:
        folder: the sweep folder.
        history: what the journal says so far.
    """

    def __init__(self, folder: str, history: History) -> None:
        self.folder = folder
        self.history = history
        self._size = 0

    @classmethod
    def create(cls, folder: str, sweep: Mapping[str, Any]) -> Journal:
        """Returns the journal of a new sweep.

        Args:
            folder: the sweep folder, which exists.
            sweep: the facts of the sweep, as plain data.

        Raises:
            ProjectError: FG563 if the folder has a journal, or cannot be written.
        """
        journal = cls(folder, History({"event": "sweep", **sweep, "form": FORM}))
        if is_begun(folder):
            raise _unusable(
                folder, "it has a sweep already", "go on with it: --resume; or start another one: --name NAME"
            )
        with suppress(FileNotFoundError):
            os.truncate(journal.file, 0)
        journal._append(journal.history.sweep)
        return journal

    @classmethod
    def open(cls, folder: str) -> Journal:
        """Returns the journal of an existing sweep; an incomplete last line is removed.

        Raises:
            ProjectError: FG563 if there is none, it is of a newer version, or a line is damaged.
        """
        # Another process may be writing a line at this moment.
        with _locked(folder):
            journal = cls(folder, read_history(folder))
            content = read_bytes(journal.file, MAX_RECORD_BYTES)
            journal._size = content.rfind(b"\n") + 1
            if journal._size != len(content):
                os.truncate(journal.file, journal._size)
        return journal

    def refresh(self) -> None:
        """Reads what another process has appended, such as an entry of a queue.

        Raises:
            ProjectError: FG563 if a line is damaged.
        """
        size = os.path.getsize(self.file)
        if size != self._size:
            self.history, self._size = read_history(self.folder), size

    @property
    def file(self) -> str:
        """The path of the journal."""
        return os.path.join(self.folder, JOURNAL)

    def announce(
        self, number: int, values: Mapping[str, str], skipped: str | None = None, same_as: int | None = None
    ) -> bool:
        """Records a trial, before it is started for the first time; returns whether no process has started it yet.

        Args:
            number: its number.
            values: its values as YAML text, by path.
            skipped: why it is not run, or None.
            same_as: the number of the earlier trial that builds the same objects, if that is why, or None.
        """
        facts = {"values": dict(values), "skipped": skipped, "same_as": same_as}
        return self._add({"event": "trial", "trial": number, **facts})

    def started(self, number: int, attempt: int, handle: Any, *, earlier_run: str | None = None) -> bool:
        """Records that an attempt at a trial is being started; returns whether it may be: it may have been removed.

        Args:
            number: the number of the trial.
            attempt: the number of the attempt, from 1.
            handle: what identifies the attempt, as plain data.
            earlier_run: the name of the newest run folder of the trial before this attempt, or None.
        """
        facts = {"attempt": attempt, "handle": handle, "earlier_run": earlier_run}
        return self._add({"event": "start", "trial": number, **facts})

    def ended(self, number: int, outcome: Outcome, *, step: int | None, cause: str = "") -> None:
        """Records how an attempt at a trial ended.

        Args:
            number: the number of the trial.
            outcome: how it ended.
            step: the last step that it finished, or None.
            cause: why it failed, or "".
        """
        self._add({"event": "end", "trial": number, "outcome": str(outcome), "step": step, "cause": cause})

    def _add(self, record: Mapping[str, Any]) -> bool:
        # Between the look at the journal and the record, no other process may write one that contradicts it.
        with _locked(self.folder):
            self.refresh()
            if self._is_too_late(record):
                return False
            self._append(record)
        self.history.take(record)
        return True

    def _is_too_late(self, record: Mapping[str, Any]) -> bool:
        """Returns whether another process has removed the trial that is to start, or started one that is to go."""
        known = self.history.trials.get(record["trial"])
        contradicted = known and {"start": known.skipped is not None, "trial": known.attempts > 0}
        return bool(contradicted and contradicted.get(record["event"]))

    def _append(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record, ensure_ascii=True) + "\n").encode()
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if os.write(descriptor, line) != len(line):
                    # A part of a line would damage the next one.
                    os.ftruncate(descriptor, size)
                    raise OSError("no space left for a whole line")
                os.fsync(descriptor)
                if size == self._size:
                    self._size += len(line)
            finally:
                os.close(descriptor)
        except OSError as error:
            why = error.strerror or str(error)
            raise _unusable(
                self.folder, f"its journal cannot be written: {why}", "free some space, and go on with it"
            ) from None


def is_begun(folder: str) -> bool:
    """Returns whether a folder has a journal with a first line; a disk that was full may have left a part of it."""
    try:
        return b"\n" in read_bytes(os.path.join(folder, JOURNAL), MAX_RECORD_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # what cannot be read is not replaced


def read_history(folder: str) -> History:
    """Returns what the journal of a sweep folder says. An incomplete last line is left out.

    Raises:
        ProjectError: FG563 if there is no journal, it is of a newer version, or a line before the last one is damaged.
    """
    try:
        content = read_bytes(os.path.join(folder, JOURNAL), MAX_RECORD_BYTES)
    except OSError as error:
        raise _unusable(
            folder, f"it holds no sweep ({error.strerror or error})", "name a folder with a sweep"
        ) from None
    # What follows the last line end was being written when the machine or the sweep ended.
    lines = content.split(b"\n")[:-1]
    history: History | None = None
    is_newer = False
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if history is None:
                is_newer = record["form"] > FORM
                history = History(record) if record["event"] == "sweep" else None
                if history is None or is_newer:
                    raise LookupError  # noqa: TRY301 - reported with the number of the line
            else:
                history.take(record)
        except (ValueError, LookupError, TypeError, RecursionError):
            what = "is of a newer version" if is_newer else f"is damaged at line {number}"
            hint = "use the version that wrote it" if is_newer else "remove this line, or start a new sweep"
            raise _unusable(folder, f"its journal {JOURNAL} {what}", hint) from None
    if history is None:
        raise _unusable(folder, f"its journal {JOURNAL} is empty", "start a new sweep")
    return history


def make_folder(folder: str) -> None:
    """Makes a sweep folder, which may exist.

    Raises:
        ProjectError: FG563 if it cannot be made.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why = f"it cannot be made: {error.strerror or error}"
        raise _unusable(folder, why, "set another output folder, or --name") from None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    try:
        with folder_lock(folder):
            yield
    except FileNotFoundError as error:
        raise _unusable(folder, f"it holds no sweep ({error.strerror})", "name a folder with a sweep") from None


@contextmanager
def sweep_lock(folder: str, what: str = "sweep", other: str = "start another sweep: --name NAME") -> Iterator[None]:
    """Context manager that holds the lock of a sweep folder, so that two sweeps never use it at once.

    Args:
        folder: the sweep folder, which exists.
        what: what is run there, for the message.
        other: what a user can do instead of waiting, for the message.

    Raises:
        ProjectError: FG564 if another process holds it.
    """
    from filelock import FileLock, Timeout  # a late import: commands that only read do not need it

    lock = FileLock(os.path.join(folder, LOCK), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ProjectError(
            f"another process runs the {what} in {folder}", code="FG564", hint=f"wait until it has ended, or {other}"
        ) from None
    except OSError as error:
        raise _unusable(folder, f"it cannot be written: {error.strerror or error}", "name another folder") from None
    try:
        yield
    finally:
        lock.release()


def _unusable(folder: str, why: str, hint: str) -> ProjectError:
    return ProjectError(f"sweep folder {folder!r}: {why}", code="FG563", hint=hint)
