"""A storage that fails at a chosen operation: the process is killed there, or the disk refuses.

Takes a storage and a fault; gives a storage that counts. Keeps true: one run without a fault counts the operations, and
the same run with a fault at operation n dies or fails there, as long as it does the same until then.
"""

import errno
import os
import signal
import threading
from pathlib import Path

from tests.reliability.wrapped import Wrapped, WrappedFile

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


class FaultyFile(WrappedFile):
    """A file of a `Faulty`: a write that fails has written half, and what cannot be closed is closed."""

    is_open = True

    def write(self, data):
        half = memoryview(data)[: len(memoryview(data)) // 2]
        self.storage.meet("write", self.file, lambda: self.inner.write(half))
        self.inner.write(data)

    def close(self):
        if self.is_open:
            self.is_open = False
            self.storage.meet("close", self.file, self.inner.close)
        self.inner.close()


class Faulty(Wrapped):
    """A storage whose operation number `at` (from 1) meets `fault`; without one it counts and notes."""

    OpenFile = FaultyFile
    TAKES_SPACE = ("create", "write", "make_folder")

    def __init__(self, fault=None, at=0, inner=None):
        super().__init__(inner)
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

    def act(self, name, do, *given):
        self.meet(name, given[-1])  # of a renaming the new name
        return do()
