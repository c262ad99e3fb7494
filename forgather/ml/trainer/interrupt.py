"""Ctrl-C at a moment that suits the run.

Takes SIGINT while the block runs; gives a flag. Keeps true: the first Ctrl-C lets the present step end,
so that what is saved is whole; the second one stops at once; the handler that was there comes back.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from forgather.ml.log import get_logger

_log = get_logger(__name__)


class Interrupt:
    """Remembers a Ctrl-C. In a thread other than the main one, signals are left alone."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            # A program that ignores Ctrl-C, or handles it in its own way, goes on doing so.
            if self._previous is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._remember)
                self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.default_int_handler(number, frame)
        self.requested = True
        _log.warning("stopping after this step; press Ctrl-C again to stop at once")
