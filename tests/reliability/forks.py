"""Fork server: processes that begin where everything is imported, so that a trial costs milliseconds.

Takes functions; gives what they returned in a process of their own, or how that process ended. Keeps true: nothing that
a function does there is seen here; a process that is stuck is ended and named. This process must have one thread.
"""

import os
import pickle
import select
import signal
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.patience import patience

_HEARD = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


class Stuck(AssertionError):
    """A process did not end in time."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    `signal` is 0 unless one killed it; `value` is what the function returned, `error` the text of what it raised.
    """

    signal: int
    status: int
    value: Any = None
    error: str = ""


class Child:
    """A process that runs `function(*args)`."""

    def __init__(self, function, *args):
        self._here, there = os.pipe()
        with warnings.catch_warnings():
            # The threads that the libraries keep are idle, and hold no lock that the child would wait for.
            warnings.simplefilter("ignore", DeprecationWarning)
            # What libraries do in a new process takes no exception: a signal that came meanwhile would be lost.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._here)
            _work(there, before, function, args)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(there)

    def kill(self):
        self.signal(signal.SIGKILL)

    def signal(self, number):
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def ended(self, timeout=60.0):
        """Waits for the process; one that takes longer is killed, and `Stuck` is raised."""
        timeout = patience(timeout)
        deadline = time.monotonic() + timeout
        pieces = []
        try:
            while True:
                ready, _, _ = select.select([self._here], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise Stuck(f"process {self.pid} did not end within {timeout:g} s")
                piece = os.read(self._here, 1 << 16)
                if not piece:
                    break
                pieces.append(piece)
        except Stuck:
            self.kill()
            raise
        finally:
            os.close(self._here)
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        value, error = pickle.loads(b"".join(pieces)) if pieces else (None, "")
        return Ended(max(0, -code), max(0, code), value, error)


def in_child(function, *args, timeout=60.0):
    """Returns how a process ended that ran `function(*args)`."""
    return Child(function, *args).ended(timeout)


def _work(there, mask, function, args):
    status = 0
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        answer = (function(*args), "")
    except BaseException:  # noqa: BLE001 - the border of a test's child process
        answer, status = (None, traceback.format_exc()), 1
    with suppress(OSError):
        os.set_blocking(there, True)
        content = pickle.dumps(answer)
        while content:
            content = content[os.write(there, content) :]
    os._exit(status)


def spread(function, cases, *args, workers=2, timeout=600.0):
    """Returns [function(case, *args) for each case], computed by `workers` processes side by side.

    The first exception of a case is raised here, with its traceback and the case.
    """
    cases = list(cases)
    children = [Child(_share, function, cases[number::workers], args) for number in range(workers)]
    results = [None] * len(cases)
    failures = []
    for number, child in enumerate(children):
        ended = child.ended(timeout)
        if ended.signal or ended.error:
            failures.append(f"signal {ended.signal}" if ended.signal else ended.error)
        else:
            results[number::workers] = ended.value
    if failures:
        raise AssertionError("\n".join(failures))
    return results


def _share(function, cases, args):
    results = []
    for case in cases:
        try:
            results.append(function(case, *args))
        except BaseException as error:
            error.add_note(f"case: {case!r}")
            raise
    return results
