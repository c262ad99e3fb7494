"""The heartbeat of a run: what its main process says about itself in `status.json`, and what a reader may conclude.

The input is the file in a run folder; the output is a `RunStatus`. A run that was killed cannot say so: its status
follows from the process that wrote the file, or, on another machine, from the age of the last heartbeat.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

from forgather.bounded import read_bytes

STATUS_FILE = "status.json"
FORM = 1
"""The number of the file's format."""
BEAT_SECONDS, STALE_SECONDS = 5.0, 25.0
"""Units: seconds. The time between two heartbeats, and the age at which a heartbeat of another machine is too old."""
_MAX_BYTES = 1_000_000


class Status(StrEnum):
    """What a run does, or how it ended."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """A signal or a request to stop ended it at a step boundary."""
    KILLED = "killed"
    """Its process no longer exists, and did not say how it ended. Never written, only concluded."""

    @property
    def is_live(self) -> bool:
        """Whether the run goes on."""
        return self in (Status.RUNNING, Status.PAUSED)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The content of `status.json`.

    Args:
        status: what the run does, or how it ended.
        pid: the number of its main process.
        process_started: the start of this process in clock ticks since boot, or None if the system does not say.
        boot_id: an identifier of this boot of the machine, or None if the system has none.
        hostname: the name of the machine.
        beat: the number of heartbeats so far.
        started: the time at which the run started, in seconds since 1970.
        updated: the time of the last heartbeat, in seconds since 1970.
        step: the last finished optimizer step, or None before the first one.
        max_steps: the number of steps of the run, or None if it is unknown.
        cause: why it failed: "code" (or None), "message" and "rank" (or None).
        control: the path of the control socket, "file", or None if the run takes no requests.
    """

    status: Status
    pid: int
    process_started: int | None
    boot_id: str | None
    hostname: str
    beat: int = 0
    started: float = 0.0
    updated: float = 0.0
    step: int | None = None
    max_steps: int | None = None
    cause: Mapping[str, Any] | None = None
    control: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether the run's process is, or was, one of this boot of this machine."""
        return self.hostname == platform.node() and self.boot_id == boot_id()

    def concluded(self, now: float) -> RunStatus:
        """Returns the status as it is now: killed, if the file says that the run goes on and it does not.

        Args:
            now: the current time in seconds since 1970.
        """
        if not self.status.is_live or self._is_alive(now):
            return self
        return replace(self, status=Status.KILLED)

    def _is_alive(self, now: float) -> bool:
        if self.is_here:
            return process_start(self.pid) is not None and self.process_started in (None, process_start(self.pid))
        if self.hostname == platform.node():
            return False  # the machine has been started again since
        # A clock that is behind the writer's makes the age negative, which is no sign of a death.
        return now - self.updated < STALE_SECONDS


def of_this_process(started: float) -> RunStatus:
    """Returns the status of a run that starts in this process.

    Args:
        started: the time of the start in seconds since 1970.
    """
    pid = os.getpid()
    return RunStatus(
        status=Status.RUNNING,
        pid=pid,
        process_started=process_start(pid),
        boot_id=boot_id(),
        hostname=platform.node(),
        started=started,
        updated=started,
    )


def write_status(run_dir: str, status: RunStatus) -> None:
    """Replaces `status.json` of a run folder.

    Args:
        run_dir: the run folder.
        status: the status.

    Raises:
        OSError: if the file cannot be written.
    """
    text = json.dumps({"form": FORM, **asdict(status)}, indent=1) + "\n"
    descriptor, draft = tempfile.mkstemp(dir=run_dir, prefix=f".{STATUS_FILE}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        # A reader sees the whole old file or the whole new one.
        os.chmod(draft, 0o644)
        os.replace(draft, os.path.join(run_dir, STATUS_FILE))
    except BaseException:
        with suppress(OSError):
            os.remove(draft)
        raise


def read_status(run_dir: str, *, now: float | None = None) -> RunStatus | None:
    """Returns the status of the run in a folder as it is now.

    Args:
        run_dir: the run folder.
        now: the current time in seconds since 1970; None to ask the clock.

    Returns:
        The status; None if there is no intact file of this or an earlier format.
    """
    try:
        found = json.loads(read_bytes(os.path.join(run_dir, STATUS_FILE), _MAX_BYTES))
        known = {name: found[name] for name in RunStatus.__dataclass_fields__ if name in found}
        status = RunStatus(**{**known, "status": Status(found["status"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return status.concluded(time.time() if now is None else now) if _is_sound(found) else None


def _is_sound(found: Mapping[str, Any]) -> bool:
    """Returns whether the values have the types of a run's own file."""
    kinds: dict[str, Any] = {
        "form": int,
        "pid": int,
        "beat": int,
        "hostname": str,
        "updated": (int, float),
        "started": (int, float),
    }
    return all(isinstance(found.get(name), kind) for name, kind in kinds.items()) and found["form"] <= FORM


@cache
def boot_id() -> str | None:
    """Returns an identifier that changes when this machine starts again, or None if the system has none."""
    try:
        return read_bytes("/proc/sys/kernel/random/boot_id", _MAX_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return None


def process_start(pid: int) -> int | None:
    """Returns when a process of this machine started; None if there is no such process.

    Args:
        pid: the number of the process.

    Units:
        clock ticks since boot; 0 on systems without `/proc`.
    """
    try:
        content = read_bytes(f"/proc/{pid}/stat", _MAX_BYTES)
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
        return 0 if _exists(pid) else None
    # The second field is the name of the program in parentheses, which may contain anything.
    fields = content[content.rindex(b")") + 2 :].split()
    # A zombie has ended; its parent has not asked for its exit status yet.
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
