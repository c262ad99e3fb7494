"""Processes that end with the process that started them, also if that one is killed.

The starting process keeps the writing end of their standard input, which the system closes when that process ends, on
every system and whatever the reason. A started process calls `end_with_parent`, which waits for this in a thread. So no
memory of a device stays taken by a process without a run.

torchrun gives each process of a run a session of its own, which nothing of the above reaches. Such a process calls
`end_with_launcher`, which looks twice a second whether the launcher is still its parent.

A module that does not know of this is started as `python -m forgather.launch.bound_process MODULE ARGUMENTS`. A
launcher such as torchrun leaves its standard input to the processes that it starts so, and ends when they have ended.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO
from weakref import WeakSet

from forgather.launcher_env import ENDS_WITH_PARENT, LAUNCHER_PROCESS
from forgather.process_limits import LISTENER

_PERIOD_SECONDS, _WATCHDOG_SECONDS = 0.5, 3.0
"""Units: seconds. The time between two looks at the parent, and the time that the watchdog of a run may take to end the
process with a message.
"""
_started: WeakSet[BoundProcess] = WeakSet()


class BoundProcess(subprocess.Popen[str]):
    """A process that ends with the current one, in a session of its own with all processes that it starts.

    Args:
        command: the words of the command, which calls `end_with_parent`, as `fgcli` does.
        env: the environment variables.
        stdout: what its standard output is connected to, as for `subprocess.Popen`.
        stderr: the same for its error stream.
        request: a line for its standard input, which it reads before it calls `end_with_parent`; "" for none.
        cwd: its working folder, or None for the current one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | IO[str],
        stderr: int | IO[str],
        request: str = "",
        cwd: str | None = None,
    ) -> None:
        super().__init__(
            command,
            cwd=cwd,
            env={**env, ENDS_WITH_PARENT: "1"},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        assert self.stdin is not None  # noqa: S101 - it is a pipe
        # `communicate` would close the standard input at once.
        self._lifeline, self.stdin = self.stdin, None
        with suppress(BrokenPipeError):
            self._lifeline.write(request)
            self._lifeline.flush()
        self._has_ended = False
        _started.add(self)

    def end(self) -> None:
        """Ends the process and all that it has started, also if it has ended itself, and waits until it is gone."""
        # A second time, the system may have given the number to others.
        if not self._has_ended:
            self._has_ended = True
            # A system may answer that processes that have ended are not ours.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        self.close_lifeline()

    def close_lifeline(self) -> None:
        """Closes the end of the standard input that the current process has."""
        with suppress(BrokenPipeError):
            self._lifeline.close()


def _close_lifelines() -> None:
    for process in _started:
        process.close_lifeline()


# Processes that load data are forked from a run, and may live longer.
os.register_at_fork(after_in_child=_close_lifelines)


def end_with_parent() -> None:
    """Makes the current process, which was started as a `BoundProcess`, end with the process that started it.

    From now on, the standard input is empty.
    """
    # Programs that this process starts have another standard input.
    os.environ.pop(ENDS_WITH_PARENT, None)
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    threading.Thread(target=_end_at_close, args=[lifeline], name=LISTENER, daemon=True).start()


def end_with_launcher() -> None:
    """Makes the current process, one of several of a run, end soon after the process that started it.

    The watchdog of a run does the same and says so, but only after the processes have found each other.
    """
    # Not the parent of now: the launcher may have ended already. Processes that a run starts have another one.
    launcher = os.environ.pop(LAUNCHER_PROCESS, None) or str(os.getppid())
    threading.Thread(target=_end_after, args=[launcher], name=LISTENER, daemon=True).start()


def _end_after(launcher: str) -> None:
    while str(os.getppid()) == launcher:
        time.sleep(_PERIOD_SECONDS)
    time.sleep(_WATCHDOG_SECONDS)
    # Processes that load data are in the same group. A launcher that makes no session would have the group of a script.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _end_at_close(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    # Processes that load data are in the same group.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
