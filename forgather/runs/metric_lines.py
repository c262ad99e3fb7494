"""The lines of a `metrics.jsonl`, read once each while the file grows.

The input is the open file; the output is records, and the numbers of the lines that are damaged. An incomplete last
line is left for the next time. A file that was written again, or cut, is noticed, so that its reader starts again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar

from forgather.cache_file import digest_of

_CHUNK_BYTES = 8_000_000
_TAIL_BYTES = 256
_MOST_DAMAGED = 20
_MAX_STEP = 2**53
"""The first whole number that a browser cannot represent exactly."""
_LONGEST_TEXT = 300
_scan: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


@dataclass
class Lines:
    """How far a file was read, and what was wrong with it.

    Args:
        offset: the number of bytes that were read.
        number: the number of lines that were read.
        inode: the inode of the file.
        modified: the time of its last change, in nanoseconds.
        tail: the digest of the last bytes before `offset`.
        damaged: the numbers of the first lines that are not records.
        num_damaged: the number of lines that are not records.
    """

    offset: int = 0
    number: int = 0
    inode: int = 0
    modified: int = 0
    tail: str = ""
    damaged: list[int] = field(default_factory=list)
    num_damaged: int = 0

    def continues(self, stream: BinaryIO) -> bool:
        """Returns whether the file still begins with the lines that were read, so that it was not replaced."""
        facts = os.fstat(stream.fileno())
        if not self.offset or facts.st_ino != self.inode or facts.st_size < self.offset:
            return False
        if facts.st_size == self.offset:
            return facts.st_mtime_ns == self.modified
        return _tail(stream, self.offset) == self.tail

    def read(self, stream: BinaryIO) -> Iterator[list[dict[str, Any]]]:
        """Yields the records of the lines that were not read yet, in lists of a few megabytes."""
        rest = b""
        stream.seek(self.offset)
        while chunk := stream.read(_CHUNK_BYTES):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                self.offset += len(whole) + 1
                yield self._records(whole + newline)
        last = _record(rest)
        if last is not None:
            # The file was cut or copied at the end of the line; if more is appended, the line end comes first.
            self.offset += len(rest)
            self.number += 1
            yield [last]
        facts = os.fstat(stream.fileno())
        self.inode, self.modified, self.tail = facts.st_ino, facts.st_mtime_ns, _tail(stream, self.offset)

    def _records(self, chunk: bytes) -> list[dict[str, Any]]:
        try:
            text = chunk.decode()
        except UnicodeDecodeError:
            return [record for line in chunk[:-1].split(b"\n") if (record := self._slowly(line)) is not None]
        found: list[dict[str, Any]] = []
        at = 0
        while at < len(text):
            end = text.find("\n", at)
            # Without a copy of each line: half of the time of a long file.
            record = _scanned(text, at, end)
            if record is None:
                record = self._slowly(text[at:end].encode())
            else:
                self.number += 1
            if record is not None:
                found.append(record)
            at = end + 1
        return found

    def _slowly(self, line: bytes) -> dict[str, Any] | None:
        self.number += 1
        record = _record(line)
        if record is None and line.strip():
            self.num_damaged += 1
            if len(self.damaged) < _MOST_DAMAGED:
                self.damaged.append(self.number)
        return record


def _scanned(text: str, at: int, end: int) -> dict[str, Any] | None:
    """Returns the record of a line in its usual form; None for any other line."""
    if text[at] != "{":
        return None
    try:
        record, stop = _scan(text, at)
    except (ValueError, StopIteration, RecursionError):
        return None
    # A torn line and the one after it can be an object together.
    if stop != end:
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < _MAX_STEP else None


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    if isinstance(step, float) and step.is_integer():
        record["step"] = step = int(step)
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _MAX_STEP
    return record if is_step or step is None else None


def _tail(stream: BinaryIO, offset: int) -> str:
    stream.seek(max(0, offset - _TAIL_BYTES))
    return digest_of(stream.read(min(offset, _TAIL_BYTES)))


@dataclass(frozen=True)
class Event:
    """Something that happened at a step: an action of control, or an anomaly.

    Args:
        step: the step, or None if the line has none.
        kind: what happened.
        text: what else the line says.
    """

    MOST: ClassVar[int] = 200
    step: int | None
    kind: str
    text: str

    @classmethod
    def of(cls, record: dict[str, Any]) -> Event:
        """Returns the event that a line with `event` is about."""
        message = record.get("message")
        others = {name: value for name, value in record.items() if name not in ("step", "time", "event", "epoch")}
        text = message if isinstance(message, str) else json.dumps(others, ensure_ascii=False) if others else ""
        return cls(record.get("step"), str(record["event"])[:_LONGEST_TEXT], text[:_LONGEST_TEXT])
