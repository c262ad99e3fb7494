"""Ctrl-C, or the SIGTERM of a scheduler, at a moment that suits the run.

Takes SIGINT and SIGTERM while the block runs; gives a flag. Keeps true: the first signal lets the present step
end, so that what is saved is whole; the second one stops at once; the handlers that were there come back.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from forgather.ml.log import get_logger

_log = get_logger(__name__)


# More than there are processes, and small enough to be added up in float32.
_OF_SIGTERM = 65536.0


class Terminated(KeyboardInterrupt):
    """SIGTERM ended the run, as Ctrl-C does: the state was saved where saving is on."""

    signal_number = signal.SIGTERM


class Interrupt:
    """Remembers a Ctrl-C or a SIGTERM. In a thread other than the main one, signals are left alone.

    Args:
        same_within: seconds within which a second signal is taken for the first one: a terminal sends it to every
            process, and a launcher passes it on once more.
    """

    def __init__(self, *, same_within: float = 0.0) -> None:
        self.requested = False
        self.same_within = same_within
        self._at = 0.0
        self._previous: dict[int, Any] = {}
        self._number = signal.SIGINT

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            # A program that ignores a signal, or handles it in its own way, goes on doing so.
            for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                if signal.getsignal(number) is usual:
                    self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @property
    def error(self) -> KeyboardInterrupt:
        """What to raise at the end of the step."""
        return Terminated() if self._number == signal.SIGTERM else KeyboardInterrupt()

    @property
    def wish(self) -> float:
        """What processes add up to learn whether one of them was asked to stop, and how."""
        return (_OF_SIGTERM if self._number == signal.SIGTERM else 1.0) if self.requested else 0.0

    @staticmethod
    def of(wishes: float) -> KeyboardInterrupt | None:
        """Returns what to raise for the wishes of all processes; None where there are none."""
        if not wishes:
            return None
        return Terminated() if wishes >= _OF_SIGTERM else KeyboardInterrupt()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._at < self.same_within:
            return
        self._number = signal.Signals(number)
        if self.requested:
            raise self.error
        self.requested, self._at = True, now
        again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
        _log.warning("stopping after this step; %s to stop at once", again)
