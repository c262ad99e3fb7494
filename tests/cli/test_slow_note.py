"""The line of a command that takes long: on a terminal only, and only if it does."""

import io
import sys
import time

import pytest

from forgather.cli.slow_note import slow_note
from tests.patience import patience


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "seconds", "expected"), [(Terminal, 0.01, "tracing"), (Terminal, 3600, ""), (io.StringIO, 0.01, "")]
)
def test_a_slow_command_says_why(stream, seconds, expected, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    end = time.monotonic() + patience(10)
    with slow_note("tracing the model", seconds=seconds):
        time.sleep(0.1)
        while expected not in sys.stderr.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert expected in sys.stderr.getvalue() and bool(expected) == bool(sys.stderr.getvalue())
