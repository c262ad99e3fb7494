"""The root cause of a failed run: classification of exceptions, and the record that a process writes for the launcher.

When one process fails, the other processes raise errors about lost connections. `classify` distinguishes these errors
from the cause, because only the cause is to be printed. Each record is a JSON file in the folder that torchrun gives
to the process.
"""

from __future__ import annotations

import json
import os
import signal
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
from forgather.run_status import record_cause

RECORD = "error.json"
CRASH = "crash.txt"
_RUN_DIR = "run_dir"
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
    """The way in which a process ended. The values are used in messages."""

    CAUSE = "cause"
    WAITED = "timed out while it waited for another process"
    LOST = "lost the connection to another process"
    STOPPED = "was stopped"
    STATUS = "ended with a status"


@dataclass(frozen=True)
class FailureRecord:
    """The record of a process that ended with a failure.

    Args:
        kind: the way in which the process ended.
        message: the type and text of the exception, on one line.
        where: the optimizer step and the phase in which the process failed.
        told: True if the process has printed the error itself.
        instant: the time of the failure.
        code: the FG code of a ForgatherError. The name of the exception type if the exception was raised in the
            construction of the run's objects, and means a mistake in code or its arguments. "" for any other failure.

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
        """True if every further attempt would fail with the same error, for example a mistake in the config."""
        return bool(self.code) and self.code not in _TRANSIENT


def classify(error: BaseException) -> FailureKind:
    """Returns the kind of a failure: a cause, a request to stop, or a consequence of a failed or unresponsive process.

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
    """Returns the type and text of an exception on one line of at most 500 characters, in which secrets are hidden."""
    text = " ".join(hide(str(error)).split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def write_record(folder: Path, record: FailureRecord, error: BaseException | None = None) -> None:
    """Writes the failure record of this process in the format that torchrun reads and shows.

    An OSError on writing is ignored, so that it does not replace the error that is being reported.

    Args:
        folder: the folder that torchrun gave this process.
        record: the record that is written.
        error: the exception whose traceback is added, or None to add no traceback.
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
    """Returns the failure record in the folder of a process, or None if there is no readable record."""
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        found = content["message"]["extraInfo"][_KEY]
        return FailureRecord(**{**found, "kind": FailureKind(found["kind"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record_of(error: BaseException, where: RunPhase, *, told: bool) -> FailureRecord:
    """Returns the failure record for an exception.

    Args:
        error: the exception.
        where: the phase in which the exception was raised.
        told: True if this process prints the exception.
    """
    code = ""
    if isinstance(error, ForgatherError):
        code = error.code
    # Only in construction, where such a type means wrong arguments; during training the same type may come from one bad
    # row.
    elif where.phase == "construction" and isinstance(error, _CODE_ERRORS):
        code = type(error).__name__
    return FailureRecord(classify(error), describe_exception(error), str(where), told, time.time(), code)


def write_run_dir(folder: Path, run_dir: str) -> None:
    """Writes the path of the run folder for the launcher, which records there how a process died without a word.

    Args:
        folder: the folder that torchrun gave this process.
        run_dir: the run folder.
    """
    with suppress(OSError):
        (folder / _RUN_DIR).write_bytes(os.fsencode(os.path.abspath(run_dir)))


def read_run_dir(folder: Path) -> str | None:
    """Returns the run folder that a process has named in its own folder, or None if it has named none."""
    try:
        return os.fsdecode((folder / _RUN_DIR).read_bytes())
    except OSError:
        return None


def record_in_run(run_dir: Path | None, record: FailureRecord, rank: int) -> None:
    """Records the root cause of a failure in the status of the run.

    Args:
        run_dir: the run folder, or None if there is none yet.
        record: the failure record of the process that failed.
        rank: the rank of this process.
    """
    if run_dir is not None:
        code = record.code if record.code.startswith("FG") else None
        record_cause(str(run_dir), message=record.message, code=code, rank=rank)


def read_crash(folder: Path) -> list[str]:
    """Returns the stack frames that `faulthandler` wrote at a crash in native code, innermost first.

    The list is empty if there was no such crash.
    """
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


def signal_name(status: int) -> str:
    """Returns the name of the signal for a negative exit status.

    Example:
        >>> signal_name(-9)
        'SIGKILL'
    """
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
