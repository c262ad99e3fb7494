"""The heartbeat of a run: what its main process says about itself in `status.json`, and what a reader may conclude.

The input is the file in a run folder; the output is a `RunStatus`. A run that was killed cannot say so: its status
follows from the process that wrote the file, or, in another container or on another machine, from the age of the last
heartbeat.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

from forgather.bounded import read_bytes
from forgather.folder_lock import folder_lock
from forgather.replaced_file import replace_file

STATUS_FILE = "status.json"
FORM = 1
"""The number of the file's format."""
BEAT_SECONDS, STALE_SECONDS = 5.0, 25.0
"""Units: seconds. The time between two heartbeats, and the age at which a heartbeat of another machine is too old."""
_MAX_BYTES = 1_000_000
# A full disk: a new file needs room, and the old content of a file can still be overwritten.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class StatusError(ValueError):
    """A `status.json` that cannot be used; the text says why."""


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


@dataclass(frozen=True)
class Sighting:
    """What a reader saw of a heartbeat, by a clock of its own: those of two machines may differ by hours.

    Args:
        since: the time at which the reader first saw the present value of `beat`, in seconds since 1970.
        has_moved: whether the reader saw a smaller value before.
    """

    since: float
    has_moved: bool


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The content of `status.json`.

    Args:
        status: what the run does, or how it ended.
        pid: the number of its main process.
        process_started: the start of this process in clock ticks since boot, or None if the system does not say.
        boot_id: an identifier of this boot of the machine, or None if the system has none.
        pid_namespace: the space in which `pid` is counted, which differs between the containers of a machine, or None
            if the system does not say.
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
    pid_namespace: str | None = None
    beat: int = 0
    started: float = 0.0
    updated: float = 0.0
    step: int | None = None
    max_steps: int | None = None
    cause: Mapping[str, Any] | None = None
    control: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether a process of this boot of this machine wrote the file, and this process can see it by its number."""
        place = (self.hostname, self.boot_id, self.pid_namespace)
        return place == (platform.node(), boot_id(), pid_namespace())

    def concluded(self, now: float, seen: Sighting | None = None) -> RunStatus:
        """Returns the status as it is now: killed, if the file says that the run goes on and it does not.

        Args:
            now: the current time in seconds since 1970.
            seen: what this reader saw of the heartbeat before, or None.
        """
        if not self.status.is_live or self._is_alive(now, seen):
            return self
        return replace(self, status=Status.KILLED)

    def _is_alive(self, now: float, seen: Sighting | None) -> bool:
        start = process_start(self.pid) if self.is_here else None
        if self.is_here and (start is not None or not _is_hidden(self.pid)):
            return start is not None and self.process_started in (None, start)
        if seen is not None and now - seen.since > STALE_SECONDS:
            return False
        if seen is not None and seen.has_moved:
            return True
        # Another machine or container may have the same name, so a name alone is no sign of a restart. A clock that is
        # behind the writer's makes the age negative, which is no sign of a death.
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
        pid_namespace=pid_namespace(),
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
    change_status(run_dir, lambda _: status)


def change_status(run_dir: str, change: Callable[[RunStatus | None], RunStatus | None]) -> None:
    """Replaces `status.json` of a run folder; no other process changes the file meanwhile.

    Args:
        run_dir: the run folder.
        change: a function that is called with the status in the file, or None if there is no intact one, and returns
            the new status, or None to leave the file as it is.

    Raises:
        OSError: if the file cannot be written.
    """
    file = os.path.join(run_dir, STATUS_FILE)
    with folder_lock(run_dir):
        new = change(stored_status(run_dir))
        if new is None:
            return
        content = (json.dumps({"form": FORM, **asdict(new)}, indent=1) + "\n").encode()
        try:
            replace_file(file, content)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            _overwrite(file, content)


def _overwrite(file: str, content: bytes) -> None:
    """Writes into the blocks that a file has already, because a full disk has no others."""
    with open(file, "r+b", buffering=0) as stream:
        stream.write(content)
        stream.truncate(len(content))


def record_cause(run_dir: str, *, message: str, code: str | None, rank: int | None) -> None:
    """Records the root cause of the failure of a run in `status.json`, from any process of the run.

    The main process may know only that it lost the connection to another one, or may no longer exist. If it died
    itself, the status is still concluded from that, and only the cause is recorded. A file that cannot be written is
    left as it is.

    Args:
        run_dir: the run folder.
        message: the type and text of the error, without secrets.
        code: the code of the error, or None if it has none.
        rank: the rank of the process that failed, or None if it is unknown.
    """

    def failed(found: RunStatus | None) -> RunStatus | None:
        if found is None:
            return None
        died = rank == 0 and found.status.is_live
        cause = {"code": code, "message": message, "rank": rank}
        return replace(found, status=found.status if died else Status.FAILED, cause=cause)

    with suppress(OSError):
        change_status(run_dir, failed)


def read_status(run_dir: str, *, now: float | None = None) -> RunStatus | None:
    """Returns the status of the run in a folder as it is now.

    Args:
        run_dir: the run folder.
        now: the current time in seconds since 1970; None to ask the clock.

    Returns:
        The status; None if there is no intact file of this or an earlier format.
    """
    status = stored_status(run_dir)
    return None if status is None else status.concluded(time.time() if now is None else now)


def stored_status(run_dir: str) -> RunStatus | None:
    """Returns the status that the file in a run folder states; None if there is no intact one of a known format."""
    try:
        return load_status(run_dir)
    except (OSError, StatusError):
        return None


def load_status(run_dir: str) -> RunStatus:
    """Returns the status that the file in a run folder states, whether the process still exists or not.

    Args:
        run_dir: the run folder.

    Raises:
        FileNotFoundError: if there is no such file.
        OSError: if the file cannot be read.
        StatusError: if the file is damaged or of a newer format.
    """
    return parse_status(read_bytes(os.path.join(run_dir, STATUS_FILE), _MAX_BYTES))


def parse_status(content: bytes) -> RunStatus:
    """Returns the status in the content of a file, whether the process still exists or not.

    Raises:
        StatusError: if the content is damaged or of a newer format.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise StatusError("it is not JSON") from None
    if not isinstance(found, dict) or type(found.get("form")) is not int:
        raise StatusError("it has no form number")
    if found["form"] > FORM:
        raise StatusError(f"it has form {found['form']}, and this version reads form {FORM}")
    return status_of_facts(found)


def status_of_facts(found: Mapping[str, Any]) -> RunStatus:
    """Returns the status that the fields of a file describe.

    Args:
        found: the fields, in the form of `asdict`.

    Raises:
        StatusError: if a field is missing or of another type.
    """
    wrong = [name for name, is_right in _RIGHT.items() if not is_right(found.get(name))]
    if wrong:
        raise StatusError(f"{wrong[0]!r} is {found.get(wrong[0])!r:.80}")
    known = {name: found[name] for name in RunStatus.__dataclass_fields__ if name in found}
    return RunStatus(**{**known, "status": Status(found["status"])})


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_instant(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


# JSON has numbers without end, which neither floats nor clocks have.
_LARGEST = 1 << 53
# The types of a run's own file, so that no reader need check them.
_RIGHT: dict[str, Callable[[Any], bool]] = {
    "status": lambda value: isinstance(value, str) and value in set(Status),
    **dict.fromkeys(("pid", "beat"), _is_count),
    **dict.fromkeys(("process_started", "step", "max_steps"), _or_none(_is_count)),
    **dict.fromkeys(("boot_id", "pid_namespace", "control"), _or_none(_is_text)),
    "hostname": _is_text,
    **dict.fromkeys(("started", "updated"), _is_instant),
    "cause": lambda value: value is None or (isinstance(value, dict) and isinstance(value.get("message"), str)),
}


@cache
def pid_namespace() -> str | None:
    """Returns the name of the space in which the numbers of processes are counted, or None if the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


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
    fields = content[content.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None  # the process ended while its file was read
    # A zombie has ended; its parent has not asked for its exit status yet.
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Returns whether a number is that of a process which the system does not show to this user (`hidepid`)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
