"""A signal of a scheduler ends a run once, however often it arrives at one moment."""

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from forgather.interrupt import SAME_SECONDS, Interrupt, Terminated, handle_signals, signal_handler


def test_signals_of_one_moment_are_one_and_a_later_one_ends_at_once():
    with Interrupt() as interrupt:
        interrupt.begin()
        for _ in range(20):
            signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested and not interrupt.at_once
        time.sleep(1.5 * SAME_SECONDS)
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        assert interrupt.at_once


def _native():
    """Does what native code of torch does where a handler raises within it."""
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        raise ValueError("could not determine the shape") from None


def test_what_native_code_makes_of_a_signal_is_still_an_end_by_a_signal():
    with pytest.raises(Terminated), signal_handler():
        _native()
    with pytest.raises(Terminated), handle_signals(Interrupt()), signal_handler():
        _native()
    with pytest.raises(Terminated), handle_signals(Interrupt()):
        _native()


def test_an_error_is_an_error_also_after_a_signal_that_was_only_remembered():
    with pytest.raises(ValueError, match="own"), handle_signals(Interrupt()), signal_handler() as interrupt:
        interrupt.begin()
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("its own")


def test_the_end_of_a_terminal_is_remembered_as_a_signal_of_a_scheduler():
    wishes = []
    for number in (signal.SIGHUP, signal.SIGTERM):
        with Interrupt() as interrupt:
            interrupt.begin()
            signal.raise_signal(number)
            assert interrupt.requested and isinstance(interrupt.error, Terminated)
            wishes.append(interrupt.stop_code)
    assert 1 == len(set(wishes))


def test_a_run_under_nohup_does_not_hear_of_the_end_of_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            interrupt.begin()
            signal.raise_signal(signal.SIGHUP)
            assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)


TALKS = """
import sys, time
from forgather.interrupt import Interrupt
with Interrupt() as interrupt:
    interrupt.begin()
    print("ready", flush=True)
    while not interrupt.requested:
        time.sleep(0.01)
    for stream in (sys.stdout, sys.stderr):
        print("the checkpoint is written", file=stream, flush=True)
    open(sys.argv[1], "w").write("saved")
"""


def test_what_is_printed_after_the_terminal_is_gone_ends_nothing(tmp_path):
    """The child has a terminal of its own, which goes while it runs."""
    done = tmp_path / "done"
    process, terminal = pty.fork()
    if not process:
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        os.execv(sys.executable, [sys.executable, "-c", TALKS, str(done)])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 100)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert 0 == os.waitstatus_to_exitcode(status)
    assert "saved" == done.read_text()
