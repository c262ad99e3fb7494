"""What a piece of work costs: it runs in a forked child under hard limits, and the system counts."""

from __future__ import annotations

import os
import pickle
import resource
import traceback
from collections.abc import Callable
from typing import NamedTuple

MAX_CPU_SECONDS = 2.0
MAX_BYTES = 512 << 20
_HARD_BYTES = 4 << 30
_HARD_SECONDS = 60


class Cost(NamedTuple):
    """What came of the work, and what it took: of the processor, and of memory at its peak."""

    result: object
    cpu_seconds: float
    peak_bytes: int

    @property
    def is_small(self) -> bool:
        """Whether it keeps to what a refusal may cost."""
        return self.cpu_seconds <= MAX_CPU_SECONDS and self.peak_bytes <= MAX_BYTES


def measured(work: Callable[[], object]) -> Cost:
    """Returns what `work` returns (anything that can be pickled) with its cost."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_AS, (_HARD_BYTES, _HARD_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (_HARD_SECONDS, _HARD_SECONDS))
            with os.fdopen(writing, "wb") as stream:
                stream.write(pickle.dumps(work()))
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child prints it and ends
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        content = stream.read()
    _, status, usage = os.wait4(child, 0)
    assert 0 == status, "the child failed, or was ended by its limits"
    return Cost(pickle.loads(content), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
