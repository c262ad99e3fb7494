"""Parts of text files: ranges of bytes of similar size, each of which can be read alone and from any line on.

Takes files with one value per line; gives shards (`ml.data.shards`), so that one large file is as good as many small
ones. A line belongs to the part in which it begins. The place of a row is the offset of its line in bytes until it is
shown: lines are counted only for a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import xxhash

from forgather.ml.data.data_errors import file_unreadable
from forgather.ml.data.file_content import file_stamp, sampled_digest
from forgather.ml.data.shards import Offset, Row

_BYTE_PLACE = re.compile(r":@(\d+)")
_DIGEST_BYTES = 4096
_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line of a file.

    Args:
        file: the path of the file.
        offset: the offset of its first byte in the file.
        text: the bytes of the line.
        number: the number of the line, counted from 1, if it is known.
    """

    file: str
    offset: int
    text: bytes
    number: int | None = None

    @classmethod
    def of(cls, file: str, offset: int, text: bytes, number: int | None = None) -> Line:
        """Returns a line, without the byte order mark that a file may begin with."""
        return cls(file, offset, text.removeprefix(_MARK) if offset == 0 else text, number)

    @property
    def place(self) -> str:
        """The place of the line for messages: its number, or its offset, which `with_line_numbers` replaces."""
        return f"{self.file}:@{self.offset}" if self.number is None else f"{self.file}:{self.number}"


ReadLines = Callable[[Iterator[Line]], Iterator[Row]]
"""A function that makes the rows of lines. It must not read ahead: a row is given before the next line is read."""


class LineParts:
    """The rows of text files as shards of similar size, see `ml.data.shards.ShardedRows`.

    Args:
        files: the files, uncompressed.
        read: the function that makes rows of lines. It must be picklable, for worker processes.
        num_parts: the number of parts, approximately: each file has at least one.
    """

    def __init__(self, files: Sequence[str], read: ReadLines, num_parts: int) -> None:
        self._read = read
        sizes = [os.path.getsize(file) for file in files]
        aim = max(1, -(-sum(sizes) // num_parts))
        self._parts: list[tuple[str, int, int]] = []
        for file, size in zip(files, sizes, strict=True):
            count = max(1, round(size / aim))
            cuts = [size * number // count for number in range(count + 1)]
            self._parts += [(file, begin, end) for begin, end in zip(cuts, cuts[1:], strict=False)]

    @property
    def num_bytes(self) -> int:
        """The size of all parts in bytes."""
        return sum(end - begin for _, begin, end in self._parts)

    @property
    def num_shards(self) -> int:
        """The number of parts."""
        return len(self._parts)

    def shard_size(self, shard: int) -> int:
        """Returns the size of a part in bytes."""
        _, begin, end = self._parts[shard]
        return end - begin

    def shard_name(self, shard: int) -> str:
        """Returns the name of the file, and the part of it."""
        file, begin, end = self._parts[shard]
        return f"{os.path.basename(file)} [{begin}:{end}]"

    def shard_digest(self, shard: int) -> str:
        """Returns a digest of the beginning of a part, which shows that the file was changed."""
        file, begin, end = self._parts[shard]
        with open(file, "rb") as stream:
            stream.seek(begin)
            return xxhash.xxh3_64_hexdigest(stream.read(min(_DIGEST_BYTES, end - begin)))

    def content_digest(self, shard: int) -> str:
        """Returns a digest of samples of a part."""
        return sampled_digest(*self._parts[shard])

    def shard_stamp(self, shard: int) -> str:
        """Returns a text that changes when the file of a part is written again."""
        return file_stamp(self._parts[shard][0])

    def open(self, shard: int, offset: Offset = None) -> LineReader:
        """Returns the rows of a part from an offset on.

        Args:
            shard: the number of the part.
            offset: the offset of a line in its file, in bytes; None for the first line of the part.
        """
        file, begin, end = self._parts[shard]
        return LineReader(file, begin, end, self._read, offset)


class LineReader:
    """The rows of the lines that begin in a range of bytes of a file.

    Args:
        file: the path of the file.
        begin: the first byte of the range.
        end: the byte after its last one.
        read: the function that makes rows of lines.
        offset: the offset of the first line to read; None for the first one of the range.

    Attributes:
        goes_on: whether the rows after one that cannot be read can be read, with a new reader at `offset`.
    """

    goes_on = True

    def __init__(self, file: str, begin: int, end: int, read: ReadLines, offset: int | None = None) -> None:
        self.file = file
        self._begin, self._end = begin, end
        self.offset: int | None = offset
        self._rows = read(self._lines())

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        return next(self._rows)

    def _lines(self) -> Iterator[Line]:
        with open(self.file, "rb") as stream:
            if self.offset is not None:
                stream.seek(self.offset)
            elif self._begin:
                # The line that begins before the range is read with that range.
                stream.seek(self._begin - 1)
                stream.readline()
            place = stream.tell()
            while place < self._end:
                if not (text := stream.readline()):
                    self.goes_on = False
                    raise file_unreadable(self.file, EOFError(f"it ends at byte {place}, and had {self._end} before"))
                # Moved before the line is parsed: a reader can go on after a line that cannot be.
                self.offset = place + len(text)
                yield Line.of(self.file, place, text)
                place = self.offset


def with_line_numbers(message: str) -> str:
    """Returns a message in which the places of lines are line numbers, as in `chats.jsonl:3`.

    Args:
        message: a message with places as `Line.place` gives them.
    """
    parts = _BYTE_PLACE.split(message)
    shown = parts[0]
    for offset, following in zip(parts[1::2], parts[2::2], strict=True):
        # The path may have blanks: the longest end of the text before that is a file.
        starts = [0, *(found.end() for found in re.finditer(r"[\s'\"]", shown))]
        file = next((shown[start:] for start in starts if os.path.isfile(shown[start:])), None)
        shown += f":@{offset}" if file is None else f":{_line_number(file, int(offset))}"
        shown += following
    return shown


def _line_number(file: str, offset: int) -> int:
    count, left = 1, offset
    with open(file, "rb") as stream:
        while left > 0 and (block := stream.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def located(error: Exception) -> Exception:
    """Returns an error; if its message names lines by their offsets, by their numbers instead.

    Args:
        error: the error that reading or preparing rows raised.
    """
    text: Any = getattr(error, "message", None)
    if isinstance(text, str) and (found := with_line_numbers(text)) != text:
        error.message = found  # type: ignore[attr-defined]
        error.args = (found, *error.args[1:])
    return error
