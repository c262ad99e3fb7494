"""Reads a `metrics.jsonl` while a run appends to it: each line once, and new bytes only.

The input is a file that may not exist yet, and how far it was read before; the output is its new lines, in blocks of a
few megabytes. A line that is not complete is read again when it is. A file that became another one, because a run was
rewound or started again, is read from its beginning. The file is opened for each look, because a network file system
refreshes what it knows of a file only then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from forgather.bounded import open_regular
from forgather.runs.metric_records import Record, record_of

BLOCK_BYTES = 1 << 22
"""Units: bytes. What is read at once. A line that is longer is no record, and never held in memory."""
_MARK_BYTES = 256
"""Units: bytes. The end of what was read, by which a rewritten file is told from one that has grown."""
_MOST_DAMAGED, _MOST_NAMED = 20, 5


@dataclass
class Position:
    """How far a file was read, and which lines of it are damaged.

    Args:
        offset: the number of bytes that were read.
        num_lines: the number of line ends among them.
        mark: the last of these bytes, as hexadecimal digits.
        state: the inode, the size and the time of the last change of the file when it was read; none before that.
        is_within_long_line: whether the bytes end within a line that is too long.
        damaged: the numbers of the first lines that are no records.
        num_damaged: the number of lines that are no records.
    """

    offset: int = 0
    num_lines: int = 0
    mark: str = ""
    state: list[int] = field(default_factory=list)
    is_within_long_line: bool = False
    damaged: list[int] = field(default_factory=list)
    num_damaged: int = 0

    def note_damage(self, line: int) -> None:
        """Counts a line that is no record."""
        self.num_damaged += 1
        if len(self.damaged) < _MOST_DAMAGED:
            self.damaged.append(line)

    @property
    def damage(self) -> str:
        """The numbers of the damaged lines, in words; empty if there are none."""
        if not self.num_damaged:
            return ""
        listed = ", ".join(map(str, self.damaged[:_MOST_NAMED]))
        return f"line{'s' if self.num_damaged > 1 else ''} {listed}{', ...' if self.num_damaged > _MOST_NAMED else ''}"


class GrowingFile:
    """A file of metrics, of which each look reads what is new.

    Args:
        file: the path of the file.
        restart: a function that is called when all earlier lines no longer count.
        position: how far the file was read before; None for a file that was not.

    Attributes:
        position: how far the file was read.
        num_bytes_read: the number of bytes that were read by this object.
    """

    def __init__(self, file: str, restart: Callable[[], None], position: Position | None = None) -> None:
        self.file = file
        self.position = position or Position()
        self.num_bytes_read = 0
        self._restart = restart

    def records(self) -> Iterator[Record]:
        """Yields the records that were appended since the last look. Damaged lines are left out and counted.

        Raises:
            OSError: if the file does not exist, or cannot be read.
        """
        for lines in self.blocks():
            yield from self.records_of(lines, self.position.num_lines + 1)

    def records_of(self, lines: bytes, first: int) -> Iterator[Record]:
        """Yields the records of lines.

        Args:
            lines: the lines.
            first: the number of the first line.
        """
        for number, line in enumerate(lines.split(b"\n"), first):
            record = record_of(line)
            if record is not None:
                yield record
            elif line.strip():
                self.position.note_damage(number)

    def blocks(self) -> Iterator[bytes]:
        """Yields the lines that were appended since the last look, many at once.

        While the caller has a block, `position` is the position before it. The last line of the file may have no line
        end, if it is a record without it.

        Raises:
            OSError: if the file does not exist, or cannot be read.
        """
        with open_regular(self.file) as stream:
            facts = os.fstat(stream.fileno())
            state = [facts.st_ino, facts.st_size, facts.st_mtime_ns]
            if state == self.position.state:
                return
            if self.position.offset and not self._continues(stream, state):
                self.begin_again()
            yield from self._blocks(stream)
            self.position.state = state

    def begin_again(self) -> None:
        """Forgets what was read."""
        self.position = Position()
        self._restart()

    def _continues(self, stream: BinaryIO, state: list[int]) -> bool:
        """Returns whether the file still begins with the bytes that were read."""
        position = self.position
        inode, size, _ = state
        # An edit in place keeps the size and changes the time.
        if not position.state or inode != position.state[0] or size == position.state[1]:
            return False
        mark = bytes.fromhex(position.mark)
        found = self._read(stream, position.offset - len(mark), len(mark) + 1)
        # A last line that was read without its end may have become a longer one.
        is_longer = (
            not mark.endswith(b"\n") and not position.is_within_long_line and found[len(mark) :] not in (b"", b"\n")
        )
        return found[: len(mark)] == mark and not is_longer

    def _blocks(self, stream: BinaryIO) -> Iterator[bytes]:
        position = self.position
        while content := self._read(stream, position.offset, BLOCK_BYTES):
            end = content.rfind(b"\n") + 1
            begin = content.find(b"\n") + 1 if position.is_within_long_line else 0
            if begin:
                # The end of the line that was too long.
                position.is_within_long_line = False
                self._advance(content[:begin])
                position.note_damage(position.num_lines)
            if end > begin:
                yield content[begin:end]
                self._advance(content[begin:end])
            elif end == 0 and len(content) == BLOCK_BYTES:
                position.is_within_long_line = True
                self._advance(content)
            elif end == 0:
                # The file may have been cut or copied at the end of the line. A line end is appended first, then.
                if not position.is_within_long_line and record_of(content) is not None:
                    yield content
                    self._advance(content)
                return

    def _advance(self, content: bytes) -> None:
        position = self.position
        position.offset += len(content)
        position.num_lines += content.count(b"\n")
        position.mark = (bytes.fromhex(position.mark) + content[-_MARK_BYTES:])[-_MARK_BYTES:].hex()

    def _read(self, stream: BinaryIO, offset: int, most: int) -> bytes:
        stream.seek(offset)
        content = stream.read(most)
        self.num_bytes_read += len(content)
        return content
