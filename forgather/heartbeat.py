"""The heartbeat of the run in this process: writes `status.json` while the run goes on, and its end.

The input is the folder of a run and its `main` object; the output is the file of `forgather.run_status`. A thread
writes it, so that a long step, a compilation or a save does not look like a death. A file that cannot be written never
ends the run. Code in both towers finds the heartbeat of this process with `current_heartbeat`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from forgather.errors import ForgatherError
from forgather.redaction import hide
from forgather.run_status import BEAT_SECONDS, RunStatus, Status, change_status, of_this_process

_LEAVING_SECONDS = 2.0
"""Units: seconds. The longest time for which the end of a run waits for the file, such as on a disk that hangs."""
_LONGEST = 500


class Heartbeat:
    """Context manager that keeps `status.json` of a run up to date, from the start of the run to its end.

    An exception that leaves the body is the cause of a failure; a `KeyboardInterrupt` is an interruption. Without an
    exception, or with a `SystemExit` of status 0, the run has finished, unless `end` was called.

    Args:
        run_dir: the run folder.
        started: the time at which the run started, in seconds since 1970.
        rank: the rank of this process, which a recorded cause names, or None for a run of one process.
        beat_seconds: the number of seconds between two heartbeats.
    """

    def __init__(
        self, run_dir: str, *, started: float, rank: int | None = None, beat_seconds: float = BEAT_SECONDS
    ) -> None:
        self.run_dir = run_dir
        self._rank = rank
        self._beat_seconds = beat_seconds
        self._status = of_this_process(started)
        self._main: object = None
        self._end: tuple[Status, Mapping[str, Any] | None] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_stopped, name="forgather-heartbeat", daemon=True)
        self._warned = False

    def __enter__(self) -> Heartbeat:
        self._beat()
        self._thread.start()
        _current.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # In a forked process that leaves the body, the heartbeat is that of its parent.
        if self not in _current:
            return
        _current.remove(self)
        if isinstance(error, KeyboardInterrupt):
            self.end(Status.INTERRUPTED)
        # `sys.exit()` and `sys.exit(0)` end a program that has done its work.
        elif error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.end(Status.FAILED, **_cause_of(error))
        self.end(Status.FINISHED)
        # The thread writes the end, because a disk that hangs must not keep the process.
        self._stopped.set()
        self._thread.join(_LEAVING_SECONDS)

    def watch(self, main: object) -> None:
        """Makes the heartbeats state the progress of `main`: `global_step` and `max_steps` of its `state`, if any."""
        self._main = main

    def update(self, **changes: Any) -> None:
        """Changes fields of the run's `RunStatus`, and writes them at once.

        Args:
            changes: the new values, such as `status=Status.PAUSED` or `control="/run/user/1000/x.sock"`.
        """
        with self._lock:
            self._status = replace(self._status, **changes)
        self._beat()

    def end(self, status: Status, *, message: str | None = None, code: str | None = None) -> None:
        """Decides how the run ended; the first call counts. It is written with the next heartbeat.

        Args:
            status: the way in which the run ended.
            message: the cause of a failure, without secrets, or None if there is no failure.
            code: the code of the error, or None if it has none.
        """
        if self._end is None:
            cause = None if message is None else {"code": code, "message": message, "rank": self._rank}
            self._end = (status, cause)

    def _beat_until_stopped(self) -> None:
        while not self._stopped.wait(self._beat_seconds):
            self._beat()
        self._beat()

    def _beat(self) -> None:
        with self._lock:
            try:
                change_status(self.run_dir, self._next)
            except FileNotFoundError:
                return  # the folder was removed: the run did not start
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    import logging  # commands that start no run save the import

                    note = "the status of the run in %s cannot be written (%s)"
                    logging.getLogger(__name__).warning(note, self.run_dir, error)

    def _next(self, stored: RunStatus | None) -> RunStatus:
        """Returns the status to write; a cause that another process of this run has recorded is kept."""
        step, max_steps = _progress_of(self._main)
        self._status = replace(
            self._status, beat=self._status.beat + 1, updated=time.time(), step=step, max_steps=max_steps
        )
        new = self._status
        if self._end is not None:
            new = replace(new, status=self._end[0], cause=self._end[1], control=None)
        is_same = stored is not None and (stored.pid, stored.started) == (new.pid, new.started)
        if stored is not None and is_same and stored.cause is not None:
            return replace(new, status=Status.FAILED, cause=stored.cause)
        return new


def _cause_of(error: BaseException) -> dict[str, str | None]:
    """Returns the type and text of an error on one line without secrets, and its code."""
    if isinstance(error, ForgatherError):
        return {"message": _one_line(error.message), "code": error.code}
    text, name = _one_line(str(error)), type(error).__name__
    return {"message": f"{name}: {text}" if text else name, "code": None}


def _one_line(text: str) -> str:
    return " ".join(hide(text).split())[:_LONGEST]


def _progress_of(main: object) -> tuple[int | None, int | None]:
    """Returns the last finished step and the number of steps of a trainer; None for a number that it does not state."""
    # The object is the user's, and may compute its attributes: no error of it belongs to the run.
    with suppress(Exception):
        state = getattr(main, "state", None)
        step, most = (getattr(state, name, None) for name in ("global_step", "max_steps"))
        return _count(step), _count(most)
    return None, None


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


_current: list[Heartbeat] = []
# A forked process, such as a worker that loads data, has no thread and is not the run.
os.register_at_fork(after_in_child=_current.clear)


def current_heartbeat() -> Heartbeat | None:
    """Returns the heartbeat of the run in this process; None outside a run, and on every rank but the main process."""
    return _current[-1] if _current else None
