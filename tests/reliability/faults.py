"""A storage that fails at a chosen operation: the process is killed there, or the disk refuses.

Takes a storage and a fault; gives a storage that counts. Keeps true: one run without a fault counts the operations, and
the same run with a fault at operation n dies or fails there, as long as it does the same until then.
"""

import errno
import os
import signal
import threading
from pathlib import Path

from forgather.ml.checkpoint.storage import LocalStorage

REFUSALS = (errno.ENOSPC, errno.EIO, errno.EACCES)


class Kill:
    """The process dies, as by `kill -9`."""

    def strike(self, what):
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def __repr__(self):
        return "Kill()"


class Refusal:
    """The disk refuses: once, or, where `lasting`, whatever takes space from then on."""

    def __init__(self, number, *, lasting=False):
        self.number = number
        self.lasting = lasting

    def strike(self, what):
        raise OSError(self.number, os.strerror(self.number), str(what))

    def __repr__(self):
        return f"Refusal({errno.errorcode[self.number]}{', lasting' * self.lasting})"


class Faulty:
    """A storage whose operation number `at` (from 1) meets `fault`; without one it counts and notes."""

    TAKES_SPACE = ("create", "write", "make_folder")

    def __init__(self, fault=None, at=0, inner=None):
        self.inner = inner or LocalStorage()
        self.fault = fault
        self.at = at
        self.operations = []
        self.struck = None
        self._lock = threading.Lock()

    def meet(self, name, file, before=lambda: None):
        """Counts an operation; `before` is what is done of it where it fails."""
        with self._lock:
            self.operations.append((name, Path(file)))
            number = len(self.operations)
        if number == self.at:
            self.struck = self.operations[-2:]  # with the one before: it tells what this one is for
        elif not (self.struck and getattr(self.fault, "lasting", False) and name in self.TAKES_SPACE):
            return
        before()
        self.fault.strike(file)

    def create(self, file):
        self.meet("create", file)
        return FaultyFile(self, file, self.inner.create(file))

    def make_folder(self, folder):
        self.meet("make_folder", folder)
        self.inner.make_folder(folder)

    def rename(self, old, new):
        self.meet("rename", new)
        self.inner.rename(old, new)

    def remove_file(self, file):
        self.meet("remove_file", file)
        self.inner.remove_file(file)

    def remove_folder(self, folder):
        self.meet("remove_folder", folder)
        self.inner.remove_folder(folder)

    def sync_folder(self, folder):
        self.meet("sync_folder", folder)
        self.inner.sync_folder(folder)

    def free_bytes(self, folder):
        return self.inner.free_bytes(folder)


class FaultyFile:
    """A file of a `Faulty`: a write that fails has written half."""

    def __init__(self, storage, file, inner):
        self._storage = storage
        self._file = file
        self._inner = inner
        self._open = True

    def write(self, data):
        half = memoryview(data)[: len(memoryview(data)) // 2]
        self._storage.meet("write", self._file, lambda: self._inner.write(half))
        self._inner.write(data)

    def sync(self):
        self._storage.meet("sync", self._file)
        self._inner.sync()

    def close(self):
        if self._open:
            self._open = False
            self._storage.meet("close", self._file, self._inner.close)
        self._inner.close()
