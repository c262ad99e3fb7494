"""A signal of a scheduler ends a run once, however often it arrives at one moment."""

import signal
import time

import pytest

from forgather.interrupt import SAME_SECONDS, Interrupt, Terminated, heard, of_process


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
    with pytest.raises(Terminated), heard():
        _native()
    with pytest.raises(Terminated), of_process(Interrupt()), heard():
        _native()
    with pytest.raises(Terminated), of_process(Interrupt()):
        _native()


def test_an_error_is_an_error_also_after_a_signal_that_was_only_remembered():
    with pytest.raises(ValueError, match="own"), of_process(Interrupt()), heard() as interrupt:
        interrupt.begin()
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("its own")
