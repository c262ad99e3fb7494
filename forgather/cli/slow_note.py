"""A line for a command that prints nothing for a while, so that nobody takes it for one that hangs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from forgather.cli.output import print_note

_PATIENCE_SECONDS = 5.0


@contextmanager
def slow_note(text: str, *, seconds: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Prints a line on a terminal if the body takes longer than a few seconds.

    Args:
        text: the line, which says what takes so long.
        seconds: the time after which it is printed.
    """
    # Files and other programs get results and findings alone, which do not depend on the speed of the machine.
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(seconds, print_note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
