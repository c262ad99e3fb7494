"""A thread beside the run that looks after the other processes: whether they live, and what they do.

Takes a connection of its own to the store; ends this process when the run has failed elsewhere. Keeps true: a process
that is killed, hangs, is stopped at once or loses its launcher takes the others with it within seconds, even where they
wait inside native code; it asks nothing of the loop, and wakes twice a second.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
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

FAILED, WANTED, STOPPED, TOLD, ENDED = "failed", "stacks_wanted", "stopped", "told", "ended"
_PERIOD_SECONDS = 0.5
GRACE_SECONDS = 3.0
"""How long a process may go on after the run has failed: time to print, not to wait for its peers."""


class Guard:
    """Looks after one process.

    Args:
        store: a connection that nobody else uses.
        facts: the position of this process.
        folder: where a crash of native code is told; None for nowhere.
    """

    def __init__(self, store: Store, facts: ProcessFacts, folder: Path | None) -> None:
        self._store = store
        self._facts = facts
        self._stop = threading.Event()
        self._parent = os.getppid()
        self._failed_since: float | None = None
        self._status = 1
        self._answered = False
        self._peers: dict[int, int] | None = None
        self._crash: IO[str] | None = None
        if folder is not None:
            # Kept open: the interpreter writes to it when it can do nothing else any more.
            self._crash = (folder / CRASH).open("w")
            faulthandler.enable(self._crash)
        self._thread = threading.Thread(target=self._watch, name="forgather-guard", daemon=True)

    def start(self) -> None:
        """Tells the others where this process is, and begins to look after them."""
        place = {"host": socket.gethostname(), "pid": os.getpid()}
        self._store.set(f"place/{self._facts.rank}", json.dumps(place))
        # Known before anything can fail: with the keeper of the store, nobody could be asked any more.
        deadline = time.monotonic() + _PERIOD_SECONDS
        while (peers := self._find_peers()) is None and time.monotonic() < deadline:
            time.sleep(_PERIOD_SECONDS / 100)
        self._peers = peers
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * _PERIOD_SECONDS)
        if self._crash is not None and faulthandler.is_enabled():
            faulthandler.disable()
            self._crash.close()

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD_SECONDS):
            if os.getppid() != self._parent:
                _end("the launcher is gone")
            # The store is gone when its keeper has ended before this process: then nothing can be asked.
            with suppress(RuntimeError):
                self._look()
            since = self._failed_since
            if since is not None and time.monotonic() - since > GRACE_SECONDS:
                _end("", self._status)

    def _look(self) -> None:
        if not self._answered and self._store.check([WANTED]):
            self._answered = True
            self._store.set(f"stacks/{self._facts.rank}", json.dumps(stack_dump.own_state()))
        if self._failed_since is None and self._store.check([FAILED]):
            self._failed_since = time.monotonic()
        if self._failed_since is None and self._store.check([STOPPED]):
            self._failed_since, self._status = time.monotonic(), int(self._store.get(STOPPED))
            # Whoever hears signals here ends as the one that was stopped: what it would wait for does not come.
            os.kill(os.getpid(), signal.SIGTERM)
        if self._failed_since is None and self.dead_peer() is not None:
            self._store.set(FAILED, "1")

    def failed_elsewhere(self) -> bool:
        """Tells whether another process has failed: a launcher ends the others by the signal that asks to stop."""
        # Nobody can say when the keeper of the store has gone.
        with suppress(RuntimeError):
            return any(self._store.check([name]) for name in (TOLD, ENDED, FAILED)) or self.dead_peer() is not None
        return False

    def wait_for_the_others(self, seconds: float) -> None:
        """Waits until no other process of this machine is there any more."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(_lives(process) for process in (self._peers or {}).values()):
            time.sleep(_PERIOD_SECONDS / 10)

    def dead_peer(self, seconds: float = 0.0) -> int | None:
        """Returns a rank on this machine whose process is gone although it never said that it was done.

        Args:
            seconds: how long to wait for one.
        """
        deadline = time.monotonic() + seconds
        while (found := self._dead_peer()) is None and time.monotonic() < deadline:
            time.sleep(_PERIOD_SECONDS / 10)
        return found

    def _dead_peer(self) -> int | None:
        if self._peers is None:
            with suppress(RuntimeError):  # the keeper of the store is gone
                self._peers = self._find_peers()
        for rank, process in (self._peers or {}).items():
            if _lives(process):
                continue
            with suppress(RuntimeError):  # its own store is gone with it
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


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end(why: str, status: int = 1) -> None:
    if why:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"ended: {why}\n")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # Nothing that hangs may keep this process: neither a handler of signals nor what the interpreter does at its end.
    os._exit(status)
