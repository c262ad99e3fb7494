"""Shards and segments: what data has to offer so that a stream can be read by parts, and what packing consumes.

Takes nothing; gives the protocols between data, packing and the trainer. A `ShardedRows` is a list of shards, each of
which can be read from any offset. The trainer deals the shards to virtual streams (`ml.data.virtual_streams`), and each
virtual stream has its own packer: a `Packer` makes rows of segments, which are documents or parts of them. Anything of
a user that has these methods can take the place of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

Row = Mapping[str, Any]

Offset = Any
"""A place in a shard that can be stored as JSON, such as a number of rows or bytes; None for the beginning."""


@runtime_checkable
class ShardReader(Protocol):
    """An iterator over the rows of a shard, which knows where it is."""

    @property
    def offset(self) -> Offset:
        """The offset of the row that is read next."""

    def __iter__(self) -> Iterator[Row]: ...

    def __next__(self) -> Row: ...


@runtime_checkable
class ShardedRows(Protocol):
    """Rows that are stored in shards, each of which can be read alone and from any row on.

    The shards and their content must be the same on every process, and in a run that is resumed. Two methods that may
    be there as well find out that they are not: `content_digest(shard)` returns a digest of samples of the content, and
    `shard_stamp(shard)` a text that changes when the shard is written again, or "" if that is unknown. With another
    stamp, or an unknown one, a resumed run reads the rows before its position again and compares them. Without the
    second method, a position is trusted, and only the block in which the run goes on is compared.
    """

    @property
    def num_shards(self) -> int:
        """The number of shards."""

    def shard_size(self, shard: int) -> int:
        """Returns the size of a shard in any unit that all shards share, such as rows or bytes.

        Shards are dealt to streams by these sizes, so that the streams of an epoch are of similar length. Return 1 for
        every shard if sizes are not known.
        """

    def shard_name(self, shard: int) -> str:
        """Returns the name of a shard for messages. Names and sizes are compared when a run is resumed."""

    def open(self, shard: int, offset: Offset = None) -> ShardReader:
        """Returns the rows of a shard from an offset on, without reading the rows before it.

        Args:
            shard: the number of the shard, from 0.
            offset: an offset that a reader of this shard had; None for the beginning.
        """


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of a document, or of a part of it, as packing consumes them.

    Args:
        ids_N: the token ids.
        labels_N: the label of each token, -100 for none; None for the ids themselves.

    Shapes:
        ids_N, labels_N: (N,), int32.
    """

    ids_N: np.ndarray
    labels_N: np.ndarray | None = None


def segment_of(row: Row) -> Segment:
    """Returns a row of tokens as a segment."""
    labels = row.get("labels")
    ids = np.asarray(row["input_ids"], dtype=np.int32)
    return Segment(ids, None if labels is None else np.asarray(labels, dtype=np.int32))


@runtime_checkable
class Packer(Protocol):
    """Makes rows of segments. One packer serves one virtual stream, so its rows do not depend on the number of ranks.

    A checkpoint stores the state of a packer: the segments that it holds back for its next row.
    """

    def add(self, segments: Sequence[Segment]) -> list[Row]:
        """Takes the next segments of the stream, and returns the rows that are full."""

    def finish(self) -> list[Row]:
        """Returns the rows of the segments that are held back, after the last segment of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as numbers, texts, lists and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
