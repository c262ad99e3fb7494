"""How long a test waits: limits are seconds of an idle machine, and grow with what the machine has to do beside.

Takes seconds; gives seconds of now. Keeps true: a limit ends what is stuck, and says nothing of what is slow; the unit is
measured, in a process of its own, when it is asked for and the last answer is old.
"""

import math
import subprocess
import sys
import time

_WORK = [sys.executable, "-I", "-S", "-c", "sum(range(3_000_000))"]
_IDLE_SECONDS = 0.05
"""What the work takes on an idle machine of today, at most half of it on a fast one."""
_MARGIN = 2.0
_OLD_SECONDS = 30.0
_last = (float("-inf"), 1.0)


def slowness() -> float:
    """Returns how many times as long as on an idle machine things take now; at least 1."""
    global _last
    began = time.monotonic()
    if began - _last[0] > _OLD_SECONDS:
        subprocess.run(_WORK, check=True)
        ended = time.monotonic()
        _last = (ended, max(1.0, (ended - began) / _IDLE_SECONDS))
    return _last[1]


def patience(seconds: float) -> int:
    """Returns how many seconds to wait for what takes less than `seconds` on an idle machine."""
    return math.ceil(seconds * _MARGIN * slowness())
