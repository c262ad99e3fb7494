"""The virtual streams of a rank, as rounds of rows, in worker processes or in this one.

Takes a `RowStream` and a share; gives rounds: the next row of each stream that has not ended. Workers divide the
streams among them, so each of them reads and tokenizes whole streams.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from forgather.ml.data.read_log import RowDigests
from forgather.ml.data.row_epoch import stay_in_epoch
from forgather.ml.data.row_stream import RowStream
from forgather.ml.data.virtual_streams import Block, VirtualStream, rounds_before, streams_of_rank
from forgather.ml.trainer.bad_rows import BadRows
from forgather.ml.trainer.batch_sampler import RankShare
from forgather.ml.trainer.data_fingerprint import Fingerprint, row_digest
from forgather.ml.trainer.data_rng import IsolatedRNG, seed_of
from forgather.ml.trainer.row_content import chained, rows_digest
from forgather.ml.trainer.shard_facts import shard_changes, shards_fingerprint


class Given(NamedTuple):
    """A row that a worker gives.

    Args:
        stream: the number of the stream.
        row: the row; None if none of the replicas for which the stream is read computes it.
        block: the block of the stream that begins with this row; None if none does.
    """

    stream: int
    row: Any
    block: Block | None


class Round(NamedTuple):
    """The rows of one round of the streams of a worker: one of each stream that has not ended.

    Args:
        worker: the number of the worker.
        number: the number of the round; -1 if there are only changes, after which reading failed.
        rows: the rows, in the order of their streams.
        is_last: whether all streams of the worker have ended.
        changes: how streams differ from what a checkpoint says of them, by the number of the stream.
        num_bad: the number of rows that the worker has left out in this epoch.
    """

    worker: int
    number: int
    rows: list[Given]
    is_last: bool
    changes: Mapping[int, str]
    num_bad: int


class RankStreams(IterableDataset[Round]):
    """The virtual streams of a rank, as rounds. Worker processes divide the streams among them.

    Args:
        stream: the rows.
        share: the slice of each global micro-batch that this process computes.
        num_streams: the number of virtual streams.
        guard: the object that decides what happens to rows that cannot be read.
        inner: the data set that the user gave, whose attributes can be read from this one.

    Attributes:
        source: what the streams read.
        replicas: the data-parallel ranks for which the streams are read.
    """

    def __init__(self, stream: RowStream, share: RankShare, num_streams: int, guard: BadRows, inner: Any) -> None:
        self.dataset = inner
        self._share, self._num_streams, self._guard = share, num_streams, guard
        self.source = stream.source(num_streams)
        self.replicas = frozenset([share.rank])
        self._stream = stream
        self._place = torch.zeros(3, dtype=torch.int64)
        # Persistent workers keep a copy of this object: shared memory tells them the next epoch.
        self._place.share_memory_()  # type: ignore[no-untyped-call]
        self._blocks: Mapping[int, Block] = {}
        self._apart = IsolatedRNG()

    @property
    def most_streams(self) -> int | None:
        """The largest number of virtual streams that the data allow; None for any."""
        return self._stream.most_streams

    @property
    def block_rows(self) -> int:
        """The number of rows of a block, which is read again after a resume, at most, of each stream."""
        return self.source.block_rows

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the shards when this run first read them."""
        return shards_fingerprint(self.source.shards)

    def changes_since(self, before: Fingerprint) -> list[str]:
        """Returns descriptions of the differences of the shards from those of a checkpoint.

        Args:
            before: the fingerprint of the checkpoint.
        """
        return shard_changes(before, self.fingerprint, self.source.shards)

    def set_position(self, *, seed: int, epoch: int, start: int, blocks: Mapping[int, Block]) -> None:
        """Sets the position at which the next iteration begins, also in persistent workers if `start` is 0.

        Args:
            seed: the base seed of the random numbers.
            epoch: the number of the epoch.
            start: the number of rows of the epoch that are given already, over all ranks.
            blocks: the block of each stream in which it goes on; a stream that is not in it is read from its beginning.
        """
        self._place.copy_(torch.tensor([seed, epoch, start]))
        self._blocks = blocks

    def __iter__(self) -> Iterator[Round]:
        seed, epoch, start = self._place.tolist()
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            stay_in_epoch(epoch)
        if callable(set_epoch := getattr(self.source.shards, "set_epoch", None)):
            set_epoch(epoch)
        orders = self.source.orders(self._num_streams, epoch)
        mine = streams_of_rank(self._num_streams, self._share.rank, self._share.size)[worker::num_workers]
        if info is not None:
            # The guard of a worker is a copy.
            self._guard.begin(sum(self._blocks[one].num_bad for one in mine if start and one in self._blocks), 0)
        streams = {number: self._opened(number, orders[number], seed, epoch, start) for number in mine}
        for number in itertools.count(start // self._num_streams):
            rows: list[Given] = []
            changes: dict[int, str] = {}
            for stream in list(streams):
                place = number * self._num_streams + stream
                if place < start:
                    continue
                try:
                    found = streams[stream].next_row()
                except Exception:
                    # What changed explains the error.
                    changes |= streams[stream].take_change()
                    yield Round(worker, -1, [], False, changes, self._guard.num_read)
                    raise
                changes |= streams[stream].take_change()
                if found is None:
                    del streams[stream]
                    continue
                is_own = place % self._share.size in self.replicas
                rows.append(Given(stream, found[0] if is_own else None, _with_arrays(found[1])))
            yield Round(worker, number, rows, not streams, changes, self._guard.num_read)
            if not streams:
                return

    def _opened(self, number: int, order: list[int], seed: int, epoch: int, start: int) -> _StreamRows:
        def seeded(*facts: int) -> AbstractContextManager[None]:
            return self._apart.seeded(seed_of(seed, *facts))

        block = self._blocks.get(number, Block()) if start else Block()
        digests = RowDigests(rows_digest, chained)
        stream = VirtualStream(
            *(self.source, order, number, epoch), start=block, guard=self._guard, seeded=seeded, digests=digests
        )
        return _StreamRows(stream, number, block, past=rounds_before(start, number, self._num_streams) - block.first)

    def __getattr__(self, name: str) -> Any:
        # Pickling looks up special methods on a copy that has no attributes yet: it would recurse for ever.
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _StreamRows:
    """The rows of a stream after its position, each with the block in which it is if no row before it had the block.

    Args:
        stream: the stream, from the block of the position on.
        number: the number of the stream.
        start: the block of the position.
        past: the number of rows from the begin of the block to the position.
    """

    def __init__(self, stream: VirtualStream, number: int, start: Block, past: int) -> None:
        self._stream, self._number, self._start = stream, number, start
        self._change: str | None = None
        self._rows = self._after(past)

    def next_row(self) -> tuple[Any, Block | None] | None:
        """Returns the next row and its block; None if there is none."""
        return next(self._rows, None)

    def take_change(self) -> dict[int, str]:
        """Returns how the stream differs from what a checkpoint says of it, once, by its number."""
        found, self._change, self._stream.change = self._stream.change or self._change, None, None
        return {self._number: found} if found else {}

    def _after(self, past: int) -> Iterator[tuple[Any, Block | None]]:
        latest = None
        for given, (row, begins) in enumerate(self._stream):
            if begins is not None:
                latest = dataclasses.replace(begins, digest=row_digest(row))
                self._compare(latest)
            if given >= past:
                # With the first row, the block in which it is: the rows before it are given again from there only.
                yield row, latest
                latest = None

    def _compare(self, block: Block) -> None:
        """Compares the first row of the block of the position, of which other settings may have made another row."""
        expected = self._start.digest
        if block.first == self._start.first and None not in (expected, block.digest) and expected != block.digest:
            self._change = "other rows are made of the same texts (by another tokenizer, column or length)"


def _with_arrays(block: Block | None) -> Block | None:
    # A tensor would be sent to the main process in a file of shared memory of its own.
    return block if block is None else dataclasses.replace(block, packer=as_arrays(block.packer))


def as_arrays(tree: Any) -> Any:
    """Returns a tree of mappings in which tensors are arrays."""
    if isinstance(tree, Mapping):
        return {name: as_arrays(item) for name, item in tree.items()}
    return tree.numpy() if isinstance(tree, Tensor) else tree
