"""`SaveClock` determines whether the interval in minutes between two checkpoints has passed.

The input is the step after each optimizer step; the output is the same on every process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from forgather.ml.distributed import collectives


class SaveClock:
    """Determines whether the interval of `save_minutes` has passed since the last checkpoint.

    Only the main process reads the clock, and it broadcasts the elapsed time. The broadcast is done only at a few
    steps, which are the same on all processes and become more frequent as the end of the interval approaches.

    Args:
        minutes: the interval between two checkpoints in minutes; None if there is no such interval.
        now: a function that returns the current time in seconds.
    """

    def __init__(self, minutes: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = None if minutes is None else 60.0 * minutes
        self._now = now
        self._since = now()
        self._from_step = self._ask_at = 0

    def restart(self, step: int) -> None:
        """Restarts the interval, at the beginning of a run and after a checkpoint was written or restored.

        Args:
            step: the number of the current step.
        """
        self._since = self._now()
        self._from_step, self._ask_at = step, step + 1

    def is_due(self, step: int) -> bool:
        """Returns whether the interval has passed. Collective: every process must call it after every step."""
        if self._seconds is None or step < self._ask_at:
            return False
        # One clock for all: with a clock of its own, a process could begin a collective save alone.
        passed = collectives.run_on_main(lambda: self._now() - self._since)
        if passed >= self._seconds:
            return True
        if collectives.is_multi_process():
            # Half of the remaining time at the current pace: if steps become slower, the next question still comes in
            # time.
            pace = passed / (step - self._from_step)
            self._ask_at = step + max(1, int((self._seconds - passed) / max(pace, 1e-6) / 2))
        return False
