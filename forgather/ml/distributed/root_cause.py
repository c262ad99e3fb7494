"""The root cause of a failed run: classification of exceptions, and the record that a process leaves for the launcher.

When one process fails, the others raise errors about lost connections. They are distinguished from the cause, which is
the only one to be printed. Records are JSON files in the folder that torchrun gives each process.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import torch.distributed as dist

from forgather.errors import ForgatherError
from forgather.ml.distributed.phase import RunPhase
from forgather.redaction import hidden, hide

RECORD = "error.json"
CRASH = "crash.txt"
_KEY = "forgather"
# Our errors that are a consequence of another process's failure.
_CONSEQUENCES = ("FG706", "FG854")
# Errors of a disk or network, which may be gone at the next attempt.
_TRANSIENT = (*_CONSEQUENCES, "FG463", "FG464", "FG609", "FG817")
# Errors in code and its arguments, which do not change from one attempt to the next.
_CODE_ERRORS = (TypeError, AttributeError, NameError, ImportError, SyntaxError)
# Parts of the messages of NCCL, gloo and the store. torch raises most of these as plain RuntimeError.
_TIMEOUT_MESSAGES = ("Timed out waiting", "timed out after", "Watchdog caught collective", "timeout waiting")
_DISCONNECT_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo",
    "Gloo",
    "recvValue failed",
    "failed to recv",
)


class FailureKind(StrEnum):
    """The way in which a process ended; the value is part of a message."""

    CAUSE = "cause"
    WAITED = "timed out while it waited for another process"
    LOST = "lost the connection to another process"
    STOPPED = "was stopped"
    STATUS = "ended with a status"


@dataclass(frozen=True)
class FailureRecord:
    """The record of a process that ended with a failure.

    Args:
        kind: the way in which it ended.
        message: type and text of the exception, on one line.
        where: step and phase.
        told: True when the process has printed the error itself.
        instant: time of the failure.
        code: the code of a Forgather error; the exception type of a mistake in constructed code; "" for any other.

    Units:
        `instant` is in seconds since the epoch.
    """

    kind: FailureKind
    message: str
    where: str
    told: bool
    instant: float
    code: str = ""

    @property
    def lasts(self) -> bool:
        """True for an error that every attempt would repeat, such as a mistake in the config: no restart helps."""
        return bool(self.code) and self.code not in _TRANSIENT


def classify(error: BaseException) -> FailureKind:
    """Returns whether an exception is a cause, or a consequence of another process that is gone or does not answer.

    Example:
        >>> classify(RuntimeError("[gloo/pair.cc:538] Connection closed by peer")).name, classify(KeyError("lr")).name
        ('LOST', 'CAUSE')
    """
    if isinstance(error, KeyboardInterrupt):
        return FailureKind.STOPPED
    # The whole chain: libraries wrap a lost connection into exceptions of their own.
    for one in _causes(error):
        if isinstance(one, ForgatherError) and one.code in _CONSEQUENCES:
            return FailureKind.LOST
        text = str(one)
        is_ours = isinstance(one, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
        if not (
            is_ours
            or (
                isinstance(one, RuntimeError)
                and any(word in text for word in (*_DISCONNECT_MESSAGES, *_TIMEOUT_MESSAGES))
            )
        ):
            continue
        return FailureKind.WAITED if any(word in text for word in _TIMEOUT_MESSAGES) else FailureKind.LOST
    return FailureKind.CAUSE


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def describe_exception(error: BaseException) -> str:
    """Returns type and text of an exception on one line, at most 500 characters, with secrets hidden."""
    text = " ".join(hide(str(error)).split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def write_record(folder: Path, record: FailureRecord, error: BaseException | None = None) -> None:
    """Writes the record of this process in the format that torchrun reads and shows; errors of the disk are ignored.

    Args:
        folder: of this process.
        record: the record.
        error: the exception, for its traceback.
    """
    where = f" ({record.where})" if record.where else ""
    stack = ""
    if isinstance(error, ForgatherError):
        # The message says what to do; a traceback through our code would only hide it.
        stack = record.message + where
    elif error is not None:
        stack = "".join(traceback.format_exception(error))
    # torchrun compares whole seconds and takes the lowest rank of the earliest one. A known cause is dated one earlier.
    second = int(record.instant) - (record.kind is FailureKind.CAUSE)
    extra = {"py_callstack": stack, "timestamp": str(second), _KEY: asdict(record)}
    text = json.dumps(hidden({"message": {"message": record.message + where, "extraInfo": extra}}))
    # Renamed when it is complete: a process that is killed while it writes must not leave half a record.
    with suppress(OSError):
        (folder / f".{RECORD}").write_text(text, encoding="utf-8")
        os.replace(folder / f".{RECORD}", folder / RECORD)


def read_record(folder: Path) -> FailureRecord | None:
    """Returns the record that a process left in its folder; None when it left none."""
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        found = content["message"]["extraInfo"][_KEY]
        return FailureRecord(**{**found, "kind": FailureKind(found["kind"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record_of(error: BaseException, where: RunPhase, *, told: bool) -> FailureRecord:
    """Returns the record of an exception.

    Args:
        error: the exception.
        where: the phase in which it was raised.
        told: True when this process prints it.
    """
    code = ""
    if isinstance(error, ForgatherError):
        code = error.code
    # Only in construction, where such a type means wrong arguments; during training the same type may come from one bad
    # row.
    elif where.phase == "construction" and isinstance(error, _CODE_ERRORS):
        code = type(error).__name__
    return FailureRecord(classify(error), describe_exception(error), str(where), told, time.time(), code)


def read_crash(folder: Path) -> list[str]:
    """Returns the stack frames of a crash in native code, innermost first, as `faulthandler` wrote them."""
    try:
        lines = (folder / CRASH).read_text(errors="replace").splitlines()
    except OSError:
        return []
    begin = next((n for n, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    frames = []
    for line in lines[begin + 1 :]:
        if not line.startswith("  File "):
            break
        frames.append(line.strip())
    return frames
