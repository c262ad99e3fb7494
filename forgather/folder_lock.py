"""A lock of a run folder, between the processes that change its status or its labels, or remove it.

The input is a folder; the output is a context. The lock is of the folder itself, so that it leaves no file, and the
operating system releases it when a process ends for any reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK_SECONDS = 2.0
"""Units: seconds. The longest wait for another process, which may hang with the disk."""


@contextmanager
def folder_lock(folder: str) -> Iterator[None]:
    """Context manager in which no other process changes `status.json` of a run folder or removes the folder.

    If another process keeps the lock for longer than two seconds, or the file system has no locks, the body runs
    without it.

    Args:
        folder: the folder.

    Raises:
        OSError: if the folder does not exist.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_locked = _is_locked(descriptor)
        try:
            yield
        finally:
            if is_locked:
                import fcntl

                # A forked process may have inherited the descriptor, and closing it would not release the lock then.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Locks an open folder; returns whether it could be locked in time."""
    try:
        import fcntl
    except ImportError:
        return False
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        except OSError:
            return False
        else:
            return True
