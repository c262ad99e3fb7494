"""Sends a request to a run that goes on, and waits for its answer.

The input is a run folder and a `Request`; the output is the `Answer`. The request goes through the run's socket if the
run is on this machine, otherwise through a file in the run folder. A run that has ended is never waited for: its true
status is an error.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from forgather.bounded import read_bytes
from forgather.errors import ControlError
from forgather.project.run_facts import is_run_folder
from forgather.project.run_reader import open_run
from forgather.run_control import (
    BY_FILE,
    FOLDER,
    MAX_BYTES,
    Answer,
    Request,
    encode_request,
    is_private,
    noted_status,
    read_answer,
)
from forgather.run_status import BEAT_SECONDS, RunStatus, Sighting, Status, read_status, stored_status

_POLL_SECONDS, _STATUS_SECONDS = 0.1, 1.0
_BEAT_SEEN_SECONDS = 1.5 * BEAT_SECONDS
_MOST_ATTEMPTS = 10
_MOST_BYTES = 16 * MAX_BYTES
_NO_REQUESTS = (
    "it has not begun to train, it has 'control: off', or its loop is not that of Forgather's trainers (a trainer of "
    "transformers or TRL, a callable); Ctrl-C or SIGTERM stops any run after it has saved"
)


def send_request(folder: str, request: Request, *, timeout: float | None, waiting: Callable[[float], None]) -> Answer:
    """Returns the answer of a run to a request.

    Args:
        folder: the run folder.
        request: the request.
        timeout: the longest wait in seconds; None to wait as long as the run goes on.
        waiting: a function that is called with the seconds since the request was sent, about ten times per second.

    Raises:
        ProjectError: FG437 if the folder is not that of a run.
        ControlError: FG510 if the run takes no requests; FG511 if it does not go on; FG514 if it does not answer in
            time; FG515 if it ended before it did what was asked; FG517 if the run is another user's.
    """
    run_dir = os.path.realpath(folder)
    status = live_status(run_dir, folder)
    _refuse_other_user(run_dir)
    is_near = status.control != BY_FILE and status.hostname == platform.node()
    send = _by_socket if is_near and os.path.exists(str(status.control)) else _by_file
    began = time.monotonic()

    def go_on() -> None:
        passed = time.monotonic() - began
        if timeout is not None and passed >= timeout:
            raise _Late
        waiting(passed)

    return send(run_dir, status, request, go_on)


class _Late(Exception):
    """The time to wait has passed."""


def live_status(run_dir: str, folder: str) -> RunStatus:
    """Returns the status of a run that goes on and takes requests.

    Args:
        run_dir: the absolute run folder.
        folder: the folder as the user named it.

    Raises:
        ProjectError: FG437 if the folder is not that of a run.
        ControlError: FG510 if the run takes no requests; FG511 if it does not go on.
    """
    status = _status_of(run_dir)
    if status is None and not is_run_folder(run_dir):
        open_run(folder)
    if status is None:
        ended = _summary_status(run_dir)
        if ended not in (None, "running"):
            raise _ended(folder, f"has {ended}" if ended == "failed" else f"is {ended}")
        raise ControlError(f"no run takes requests in {folder!r}", code="FG510", hint=_NO_REQUESTS)
    if not status.status.is_live:
        raise _ended(folder, _words(status))
    if status.control is None:
        raise ControlError(f"the run in {folder!r} takes no requests", code="FG510", hint=_NO_REQUESTS)
    return status


def _status_of(run_dir: str) -> RunStatus | None:
    """Returns the status of a run as it is now, with the address at which it takes requests."""
    if (status := read_status(run_dir)) is not None:
        return _seen_again(run_dir, status) if status.status is Status.KILLED and not status.is_here else status
    # A run that was started from Python has no heartbeat, so that its process alone says whether it goes on.
    noted = noted_status(run_dir)
    return noted.concluded(time.time()) if noted is not None and noted.is_here else noted


def _seen_again(run_dir: str, killed: RunStatus) -> RunStatus:
    """Returns the status of a run elsewhere whose heartbeat is old by this clock: the other one may be behind."""
    since = time.time()
    time.sleep(_BEAT_SEEN_SECONDS)
    later = stored_status(run_dir)
    if later is None or later.beat <= killed.beat:
        return killed
    return later.concluded(time.time(), Sighting(since, has_moved=True))


def _words(status: RunStatus) -> str:
    at = "" if status.step is None else f" at step {status.step}"
    words = {
        Status.FINISHED: "has finished",
        Status.FAILED: "has failed",
        Status.INTERRUPTED: "was interrupted",
        Status.KILLED: "was killed",
    }
    return words.get(status.status, "goes on") + at


def _ended(folder: str, how: str) -> ControlError:
    hint = "'fgcli train --resume' with the same config continues from its last checkpoint"
    return ControlError(f"the run in {folder!r} {how}: it takes no requests", code="FG511", hint=hint)


def _summary_status(run_dir: str) -> str | None:
    """Returns the status in `summary.json`, of a run whose version wrote no other."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(read_bytes(os.path.join(run_dir, "summary.json"), 10_000_000))["status"])
    return None


def _refuse_other_user(run_dir: str) -> None:
    if os.stat(run_dir).st_uid not in (os.getuid(), 0):
        raise ControlError(
            f"the run in {run_dir!r} is another user's",
            code="FG517",
            hint="only the user who started a run controls it",
        )


def _gone(run_dir: str) -> ControlError | None:
    """Returns the error for a run that has ended meanwhile; None if it goes on."""
    status = _status_of(run_dir)
    if status is not None and status.status.is_live:
        return None
    how = "has ended" if status is None else _words(status)
    return ControlError(
        f"the run {how} before it answered", code="FG515", hint="its record and its checkpoints say what it has done"
    )


@contextmanager
def _connected(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_POLL_SECONDS)
        connection.connect(path)
        # The path is from a file in a folder that others may write to.
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            raise ControlError(f"the socket {path!r} is another user's", code="FG517")
        yield connection


def _by_socket(run_dir: str, status: RunStatus, request: Request, go_on: Callable[[], None]) -> Answer:
    try:
        with _connected(str(status.control)) as connection:
            connection.sendall(encode_request(request))
            return read_answer(_received(run_dir, connection, go_on))
    except _Late:
        raise _late("the run has the request, and will do it at the end of the step") from None
    except OSError as error:
        raise _gone(run_dir) or ControlError(
            f"the run does not answer: {error.strerror or error}", code="FG515", hint="try again"
        ) from None


def _received(run_dir: str, connection: socket.socket, go_on: Callable[[], None]) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        go_on()
        try:
            part = connection.recv(MAX_BYTES)
        except TimeoutError:
            continue
        if not part:
            raise _gone(run_dir) or ControlError("the run ended before it answered", code="FG515")
        received += part
        if len(received) > _MOST_BYTES:
            break  # no run answers so much
    return received


def _by_file(run_dir: str, status: RunStatus, request: Request, go_on: Callable[[], None]) -> Answer:
    folder = os.path.join(run_dir, FOLDER)
    name = secrets.token_hex(16)
    asked, reply = (os.path.join(folder, f"{kind}-{name}.json") for kind in ("request", "answer"))
    try:
        _write_request(folder, name, asked, encode_request(request))
    except OSError as failure:
        raise ControlError(
            f"the request cannot be written into {folder!r}: {failure.strerror or failure}",
            code="FG515",
            hint="make room, or change the permissions of the folder; SIGTERM stops a run after it has saved",
        ) from None
    looked = time.monotonic()
    try:
        while True:
            go_on()
            if (answer := _read_reply(reply)) is not None:
                return answer
            if time.monotonic() - looked > _STATUS_SECONDS:
                looked = time.monotonic()
                if (ended := _gone(run_dir)) is not None and not os.path.exists(reply):
                    raise ended
            time.sleep(_POLL_SECONDS)
    except _Late:
        if _withdrawn(asked):
            raise _late("the request is withdrawn: the run has not read it") from None
        raise _late("the run has the request, and will do it at the end of the step") from None
    except BaseException:
        _withdrawn(asked)
        raise
    finally:
        with suppress(OSError):
            os.rmdir(folder)


def _write_request(folder: str, name: str, asked: str, content: bytes) -> None:
    draft = os.path.join(folder, f"{name}.draft")
    for attempt in range(_MOST_ATTEMPTS):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        try:
            if not is_private(os.lstat(folder), is_folder=True):
                raise ControlError(
                    f"{folder!r} is not a folder to which this user alone can write",
                    code="FG517",
                    hint="remove it, and try again",
                )
            stream = open(draft, "xb", opener=lambda path, flags: os.open(path, flags, 0o600))
        except FileNotFoundError:
            # Another client, whose request was answered, has removed the folder just now.
            if attempt == _MOST_ATTEMPTS - 1:
                raise
            continue
        break
    try:
        with stream:
            stream.write(content)
        # The run sees the whole file or none.
        os.rename(draft, asked)
    except OSError:
        with suppress(OSError):
            os.remove(draft)
            os.rmdir(folder)
        raise


def _read_reply(file: str) -> Answer | None:
    """Returns the answer in a file, which is removed; None if there is none yet."""
    try:
        content = read_bytes(file, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ControlError(
            f"the answer of the run in {file!r} cannot be read: {error.strerror or error}", code="FG517"
        ) from None
    with suppress(OSError):
        os.remove(file)
    return read_answer(content)


def _withdrawn(asked: str) -> bool:
    try:
        os.remove(asked)
    except FileNotFoundError:
        return False
    return True


def _late(what: str) -> ControlError:
    return ControlError(
        f"no answer within the time of --timeout; {what}", code="FG514", hint="wait longer, or ask again"
    )
