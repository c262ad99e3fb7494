"""The watchdog: a thread that ends the process when another process of the run has failed, or the launcher is gone.

The ranks exchange liveness, status and stacks through a store, to which the watchdog has its own connection. If one
process is killed, reports a hang, is stopped or loses its launcher, the other processes end within seconds, even while
they are blocked in native code. The thread wakes up twice a second and does not depend on the training loop.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from torch._C._distributed_c10d import Store

from forgather.launcher_env import ProcessFacts
from forgather.ml.distributed import stack_dump
from forgather.ml.distributed.root_cause import CRASH

FAILED, STACKS_WANTED, STOPPED, PRINTED, ENDED = "failed", "stacks_wanted", "stopped", "told", "ended"
_PERIOD_SECONDS = 0.5
GRACE_SECONDS = 3.0
"""The seconds for which a process may continue after the run has failed: enough to print an error."""


class Watchdog:
    """The watchdog of one process.

    Args:
        store: a connection to the store that only the watchdog uses.
        facts: the position of this process.
        folder: the folder in which the stack of a crash in native code is written, or None to write no stack.

    Units:
        All times are in seconds.
    """

    def __init__(self, store: Store, facts: ProcessFacts, folder: Path | None) -> None:
        self._store = store
        self._facts = facts
        self._stop = threading.Event()
        # A process whose parent dies is adopted by another one, so a changed parent means that the launcher is gone.
        self._parent = os.getppid()
        self._failed_since: float | None = None
        self._status = 1
        self._answered = False
        self._peers: dict[int, int] | None = None
        self._crash: IO[str] | None = None
        if folder is not None:
            # Opened early and kept open: `faulthandler` writes from a signal handler, where opening a file is not
            # possible.
            self._crash = (folder / CRASH).open("w")
            faulthandler.enable(self._crash)
        # A daemon, so that a run that ends normally never waits for this thread.
        self._thread = threading.Thread(target=self._watch, name="forgather-guard", daemon=True)

    def start(self) -> None:
        """Publishes the host name and process id of this process, and starts the thread."""
        # With the process id, peers on the same machine can see by themselves whether this process is alive.
        place = {"host": socket.gethostname(), "pid": os.getpid()}
        self._store.set(f"place/{self._facts.rank}", json.dumps(place))
        # Peers are looked up early: when rank 0 dies and hosted the store, the store cannot be asked any more.
        deadline = time.monotonic() + _PERIOD_SECONDS
        while (peers := self._find_peers()) is None and time.monotonic() < deadline:
            time.sleep(_PERIOD_SECONDS / 100)
        self._peers = peers
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and closes the crash file."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * _PERIOD_SECONDS)
        if self._crash is not None and faulthandler.is_enabled():
            faulthandler.disable()
            self._crash.close()

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD_SECONDS):
            if os.getppid() != self._parent:
                _exit_now("the launcher has ended")
            # The process that hosted the store may have ended first; no question has an answer then.
            with suppress(RuntimeError):
                self._look()
            since = self._failed_since
            if since is not None and time.monotonic() - since > GRACE_SECONDS:
                _exit_now("", self._status)

    def _look(self) -> None:
        if not self._answered and self._store.check([STACKS_WANTED]):
            self._answered = True
            self._store.set(f"stacks/{self._facts.rank}", json.dumps(stack_dump.local_state()))
        if self._failed_since is None and self._store.check([FAILED]):
            self._failed_since = time.monotonic()
        if self._failed_since is None and self._store.check([STOPPED]):
            self._failed_since, self._status = time.monotonic(), int(self._store.get(STOPPED))
            # A handler in this process then stops the run as for a signal of its own, instead of waiting for a peer
            # that has left.
            os.kill(os.getpid(), signal.SIGTERM)
        if self._failed_since is None and self.dead_peer() is not None:
            self._store.set(FAILED, "1")

    def failed_elsewhere(self) -> bool:
        """Returns True if another process has failed.

        This tells two meanings of SIGTERM apart: a launcher sends it to end the remaining processes after a failure,
        and a scheduler or a user sends it to make a run save and stop.
        """
        # Without the store, failures of other machines are unknown.
        with suppress(RuntimeError):
            return any(self._store.check([name]) for name in (PRINTED, ENDED, FAILED)) or self.dead_peer() is not None
        return False

    def wait_for_the_others(self, seconds: float) -> None:
        """Waits until no other process of the run is alive on this machine.

        Args:
            seconds: the maximum wait, in seconds.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(_is_alive(process) for process in (self._peers or {}).values()):
            time.sleep(_PERIOD_SECONDS / 10)

    def dead_peer(self, seconds: float = 0.0) -> int | None:
        """Returns a rank on this machine whose process has died without reporting that it was done.

        Args:
            seconds: the maximum wait for such a rank, in seconds.

        Returns:
            The rank, or None if there is no such rank.
        """
        deadline = time.monotonic() + seconds
        while (found := self._dead_peer()) is None and time.monotonic() < deadline:
            time.sleep(_PERIOD_SECONDS / 10)
        return found

    def _dead_peer(self) -> int | None:
        if self._peers is None:
            with suppress(RuntimeError):  # the process that hosted the store is gone
                self._peers = self._find_peers()
        for rank, process in (self._peers or {}).items():
            if _is_alive(process):
                continue
            with suppress(RuntimeError):  # the dead process hosted the store
                if self._store.check([f"done/{rank}"]):
                    continue
            return rank
        return None

    def _find_peers(self) -> dict[int, int] | None:
        names = {rank: f"place/{rank}" for rank in range(self._facts.world_size) if rank != self._facts.rank}
        if not self._store.check(list(names.values())):
            return None
        places: dict[int, Any] = {rank: json.loads(self._store.get(name)) for rank, name in names.items()}
        here = socket.gethostname()
        return {rank: place["pid"] for rank, place in places.items() if place["host"] == here}


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _exit_now(why: str, status: int = 1) -> None:
    if why:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"ended: {why}\n")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # `os._exit`, because neither a signal handler nor the interpreter's shutdown may block a process that has to end.
    os._exit(status)


def kill_in_a_second(process: int) -> None:
    """Kills another process one second from now, by a shell that outlives the current process.

    The other process does not react to SIGTERM, and torchrun would wait 30 s for it. The kill is delayed because the
    other process must end after the current process, which was the first to fail and has printed the root cause.

    Args:
        process: the id of the process to kill.
    """
    # A new session, so that the signal which ends this process group does not end the shell as well.
    nowhere = subprocess.DEVNULL
    words = ["/bin/sh", "-c", f"sleep 1; kill -KILL {process}"]
    with suppress(OSError):
        subprocess.Popen(words, start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere)  # noqa: S603
