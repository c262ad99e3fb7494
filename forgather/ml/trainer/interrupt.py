"""Ctrl-C, or the SIGTERM of a scheduler, at a moment that suits the run.

Takes SIGINT and SIGTERM while the block runs; gives a flag. Keeps true: the first signal lets the present step
end, so that what is saved is whole; the second one stops at once; the handlers that were there come back.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from forgather.ml.log import get_logger

_log = get_logger(__name__)


class Terminated(KeyboardInterrupt):
    """SIGTERM ended the run, as Ctrl-C does: the state was saved where saving is on."""

    signal_number = signal.SIGTERM


class Interrupt:
    """Remembers a Ctrl-C or a SIGTERM. In a thread other than the main one, signals are left alone."""

    def __init__(self) -> None:
        self.requested = False
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

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._number = signal.Signals(number)
        if self.requested:
            raise self.error
        self.requested = True
        again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
        _log.warning("stopping after this step; %s to stop at once", again)
