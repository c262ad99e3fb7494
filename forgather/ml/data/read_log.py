"""What a stream has read of its current shard, as digests by which a resumed run finds out that the shard changed.

Takes the rows of each block as they were read, before they are prepared; gives a `RawRows`, which a checkpoint stores
with the block. The functions that make digests are the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from forgather.ml.data.shards import Row

ALWAYS_COMPARED = 1000
"""The number of rows of a shard up to which they are read again at a resume, whatever the stamp of the shard says."""


@dataclass(frozen=True, slots=True)
class RawRows:
    """The rows of a shard up to the end of a block, as they were read.

    Args:
        count: the number of rows of the shard before the block.
        before: a digest of these rows.
        content: a digest of the rows of the block.
        stamp: the stamp of the shard when it was opened, see `ml.data.shards`; "" if it has none.
    """

    count: int
    before: str
    content: str
    stamp: str


class RowDigests(NamedTuple):
    """The functions that make digests of rows.

    Args:
        of_rows: a function that returns a digest of rows.
        chained: a function that returns the digest of two digests.
    """

    of_rows: Callable[[list[Row]], str]
    chained: Callable[[str, str], str]


class ReadLog:
    """The digests of the rows that were read of a shard.

    Args:
        digests: the functions that make digests; None for a log that says nothing.
    """

    def __init__(self, digests: RowDigests | None) -> None:
        self._digests = digests
        self._stamp = ""
        self._before: str | None = None
        self.count = 0

    def open(self, stamp: str | None) -> None:
        """Begins with the first row of a shard.

        Args:
            stamp: the stamp of the shard; None if it has none.
        """
        self._stamp, self._before, self.count = stamp or "", "", 0

    def go_on(self, raw: RawRows, stamp: str | None) -> None:
        """Goes on with a block of a checkpoint.

        Args:
            raw: what the checkpoint says of the rows before the block.
            stamp: the stamp of the shard now; None if it has none.
        """
        self._stamp, self._before, self.count = stamp or "", raw.before, raw.count

    def add(self, rows: list[Row]) -> RawRows | None:
        """Returns what is known of a block, and goes on after it; None if the rows before it are unknown.

        Args:
            rows: the rows of the block.
        """
        if self._digests is None or self._before is None:
            return None
        found = RawRows(self.count, self._before, self._digests.of_rows(rows), self._stamp)
        self._before = self._digests.chained(self._before, found.content)
        self.count += len(rows)
        return found

    def stop(self) -> None:
        """Says nothing until the next shard begins."""
        self._before = None

    def agrees(self, raw: RawRows) -> bool:
        """Returns whether the rows that were added are those before the block of a checkpoint."""
        return (self.count, self._before) == (raw.count, raw.before)


def stamp_of(shards: Any, shard: int) -> str | None:
    """Returns the stamp of a shard: "" if it is unknown, None if shards have none, and positions are trusted."""
    stamp: Callable[[int], str] | None = getattr(shards, "shard_stamp", None)
    return None if stamp is None else stamp(shard)


def is_read_again(raw: RawRows, stamp: str | None) -> bool:
    """Returns whether the rows before the block of a checkpoint are read again, to compare them.

    Args:
        raw: what the checkpoint says of them.
        stamp: the stamp of the shard now.
    """
    return stamp is not None and (raw.count <= ALWAYS_COMPARED or not stamp or stamp != raw.stamp)
