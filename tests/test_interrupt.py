"""A signal of a scheduler ends a run once, however often it arrives at one moment."""

import signal
import time

import pytest

from forgather.interrupt import SAME_SECONDS, Interrupt, Terminated


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
