"""The first cause of a failed run: which of the things that went wrong in several processes began it.

Takes exceptions of a process; gives what kind each is, and the record that it leaves for its launcher. Keeps true: one
process that fails takes the others with it, and what they raise then (lost connections) is told apart from a cause.
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
# Errors of ours that tell of another process's failure.
_FOLLOWS = ("FG706", "FG854")
# Those of a disk or a network, which may be there again.
_PASSING = (*_FOLLOWS, "FG463", "FG464", "FG609", "FG817")
# Of code and its arguments, and of nothing that changes from one attempt to the next.
_SLIPS = (TypeError, AttributeError, NameError, ImportError, SyntaxError)
_WAITED = ("Timed out waiting", "timed out after", "Watchdog caught collective", "timeout waiting")
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo",
    "Gloo",
    "recvValue failed",
    "failed to recv",
)


class Kind(StrEnum):
    """What ended a process."""

    CAUSE = "cause"
    WAITED = "waited for another process until its time was up"
    LOST = "lost another process"
    STOPPED = "was stopped"
    STATUS = "ended with a status"


@dataclass(frozen=True)
class Record:
    """What a process leaves behind when it ends badly.

    Args:
        kind: what ended it.
        message: type and text of the exception.
        where: step and phase.
        told: whether the process has told it to its user.
        instant: when, in seconds since the epoch.
        code: of an error of ours; the type of a slip in what is constructed; "" for any other.
    """

    kind: Kind
    message: str
    where: str
    told: bool
    instant: float
    code: str = ""

    @property
    def lasts(self) -> bool:
        """True for a mistake that the same run makes again: of the config, or of what it is given."""
        return bool(self.code) and self.code not in _PASSING


def kind_of(error: BaseException) -> Kind:
    """Tells a cause from what follows when another process is gone or does not answer.

    Example:
        >>> kind_of(RuntimeError("[gloo/pair.cc:538] Connection closed by peer")).name, kind_of(KeyError("lr")).name
        ('LOST', 'CAUSE')
    """
    if isinstance(error, KeyboardInterrupt):
        return Kind.STOPPED
    for one in _chain(error):
        if isinstance(one, ForgatherError) and one.code in _FOLLOWS:
            return Kind.LOST
        text = str(one)
        is_ours = isinstance(one, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
        if not (is_ours or (isinstance(one, RuntimeError) and any(word in text for word in (*_LOST, *_WAITED)))):
            continue
        return Kind.WAITED if any(word in text for word in _WAITED) else Kind.LOST
    return Kind.CAUSE


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def described(error: BaseException) -> str:
    """Returns type and message of an exception, on one line."""
    text = " ".join(hide(str(error)).split())
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def write_record(folder: Path, record: Record, error: BaseException | None = None) -> None:
    """Leaves a record in a process's folder, in the form that torchrun reads and shows."""
    where = f" ({record.where})" if record.where else ""
    stack = ""
    if isinstance(error, ForgatherError):
        # It says what to do; where in our code it was raised helps nobody.
        stack = record.message + where
    elif error is not None:
        stack = "".join(traceback.format_exception(error))
    # torchrun counts whole seconds, and takes the lowest rank of the first one for the cause: a known one is earlier.
    second = int(record.instant) - (record.kind is Kind.CAUSE)
    extra = {"py_callstack": stack, "timestamp": str(second), _KEY: asdict(record)}
    text = json.dumps(hidden({"message": {"message": record.message + where, "extraInfo": extra}}))
    # A process that is ended while it writes must not leave half a record.
    with suppress(OSError):
        (folder / f".{RECORD}").write_text(text, encoding="utf-8")
        os.replace(folder / f".{RECORD}", folder / RECORD)


def read_record(folder: Path) -> Record | None:
    """Returns the record that a process left in its folder; None where it left none."""
    try:
        told = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        found = told["message"]["extraInfo"][_KEY]
        return Record(**{**found, "kind": Kind(found["kind"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record_of(error: BaseException, where: RunPhase, *, told: bool) -> Record:
    """Returns the record of an exception."""
    code = ""
    if isinstance(error, ForgatherError):
        code = error.code
    elif where.phase == "construction" and isinstance(error, _SLIPS):
        code = type(error).__name__
    return Record(kind_of(error), described(error), str(where), told, time.time(), code)


def read_crash(folder: Path) -> list[str]:
    """Returns the frames, innermost first, of the stack that the interpreter wrote when native code crashed."""
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
