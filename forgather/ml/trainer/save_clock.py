"""When so many minutes have passed since the last checkpoint.

Takes an interval and steps; gives yes or no, the same on every process. Keeps true: the clock is that of the process
that writes; it is asked at steps on which all have agreed, more often the nearer the moment is, so that other steps
send nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from forgather.ml.distributed import collectives


class SaveClock:
    """Tells when a checkpoint is due.

    Args:
        minutes: between two checkpoints; None for no such interval.
        now: gives seconds.
    """

    def __init__(self, minutes: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = None if minutes is None else 60.0 * minutes
        self._now = now
        self._since = now()
        self._from_step = self._ask_at = 0

    def restart(self, step: int) -> None:
        """Begins to count anew: the run begins, a checkpoint was written, or the run went back to one."""
        self._since = self._now()
        self._from_step, self._ask_at = step, step + 1

    def is_due(self, step: int) -> bool:
        """Tells whether the time has passed; every process asks after every step."""
        if self._seconds is None or step < self._ask_at:
            return False
        passed = collectives.by_writer(lambda: self._now() - self._since)
        if passed >= self._seconds:
            return True
        if collectives.several():
            # Half of what is left, at the pace so far: steps that get slower do not carry it far beyond the moment.
            pace = passed / (step - self._from_step)
            self._ask_at = step + max(1, int((self._seconds - passed) / max(pace, 1e-6) / 2))
        return False
