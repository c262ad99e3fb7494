"""Large pages for the process that holds the whole suite: a fork of it copies a table of its pages, a tenth of a second.

Keeps true: what tests start is as users start it; where the system has no large pages, nothing changes.
"""

import ctypes
import os
from pathlib import Path

MALLOC = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1
_PAGE = 2 << 20
_MAPS = Path("/proc/self/maps")


def ask_malloc(*, starts_workers):
    """Has the processes of xdist, which read it when they start, take large pages; in these it is not handed on."""
    name, value = MALLOC
    if starts_workers:
        os.environ.setdefault(name, value)
    elif "PYTEST_XDIST_WORKER" in os.environ and os.environ.get(name) == value:
        del os.environ[name]


def collapse():
    """Makes large pages of what this process has written so far."""
    if not _MAPS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    for line in _MAPS.read_text().splitlines():
        places, access, *_ = line.split()
        first, last = (int(place, 16) for place in places.split("-"))
        first, last = -(-first // _PAGE) * _PAGE, last // _PAGE * _PAGE
        if access.startswith("rw") and "/" not in line and first < last:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE)
