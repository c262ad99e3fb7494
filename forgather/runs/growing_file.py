"""Reads a JSON lines file while another process appends to it: each line once, and new bytes only.

The input is a file that may not exist yet; the output is its records, in their order. An incomplete last line is read
again when it is complete. A file that became another one, because a run was rewound or started again, is read from its
beginning. The file is opened for each look, because a network file system refreshes what it knows of a file only then.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

CHUNK_BYTES = 1 << 18
_MARK_BYTES = 64
"""Units: bytes. The end of what was read, by which a rewritten file is told from one that has grown."""

Record = dict[str, Any]


class GrowingFile:
    """A JSON lines file of which each update reads what is new.

    Args:
        file: the path of the file.
        take: a function that is called with each record. Lines that are no JSON objects are left out and counted.
        restart: a function that is called when all earlier records no longer count.

    Attributes:
        num_damaged: the number of complete lines that are no JSON objects.
        num_bytes_read: the number of bytes that were read so far.
    """

    def __init__(self, file: str, take: Callable[[Record], None], restart: Callable[[], None]) -> None:
        self.file = file
        self.num_damaged = 0
        self.num_bytes_read = 0
        self._take = take
        self._restart = restart
        self._offset = 0
        self._mark = b""
        self._state: tuple[int, int, int] | None = None
        self._is_within_long_line = False

    def update(self) -> bool:
        """Reads what was appended since the last call; returns whether anything has changed.

        A file that does not exist or cannot be read has nothing new.
        """
        with suppress(OSError):
            # Without waiting, because a pipe has the name of a file, too.
            descriptor = os.open(self.file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            try:
                facts = os.fstat(descriptor)
                state = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
                if state == self._state or not stat.S_ISREG(facts.st_mode):
                    return False
                # A file that was rewritten, even if it is longer now, has other bytes where the last line was.
                is_other = self._pread(descriptor, len(self._mark), self._offset - len(self._mark)) != self._mark
                if is_other:
                    self._begin_again()
                has_read = self._read(descriptor)
                self._state = state
                return has_read or is_other
            finally:
                os.close(descriptor)
        return False

    def _begin_again(self) -> None:
        self._offset, self._mark, self._is_within_long_line, self.num_damaged = 0, b"", False, 0
        self._restart()

    def _read(self, descriptor: int) -> bool:
        begin = self._offset
        while content := self._pread(descriptor, CHUNK_BYTES, self._offset):
            end = content.rfind(b"\n") + 1
            if end == 0:
                if len(content) < CHUNK_BYTES:
                    break  # the last line is not complete yet
                # No record is that long: the line is left out, and never held in memory.
                self._is_within_long_line, end = True, len(content)
            else:
                self._take_lines(content[:end])
            self._offset += end
            self._mark = (self._mark + content[:end])[-_MARK_BYTES:]
        return self._offset != begin

    def _take_lines(self, content: bytes) -> None:
        for line in content.split(b"\n")[:-1]:
            if self._is_within_long_line:
                self._is_within_long_line = False
                self.num_damaged += 1
                continue
            record = _record(line)
            if record is not None:
                self._take(record)
            elif line.strip():
                self.num_damaged += 1

    def _pread(self, descriptor: int, length: int, offset: int) -> bytes:
        content = os.pread(descriptor, length, offset)
        self.num_bytes_read += len(content)
        return content


def _record(line: bytes) -> Record | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
