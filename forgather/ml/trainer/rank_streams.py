"""The virtual streams of a rank, as rounds of rows, in worker processes or in this one.

Takes a `RowStream` and a share; gives rounds: the next row of each stream that has not ended. Workers divide the
streams among them, so each of them reads and tokenizes whole streams.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from forgather.ml.data.row_epoch import stay_in_epoch
from forgather.ml.data.row_stream import RowStream
from forgather.ml.data.virtual_streams import Block, VirtualStream, rounds_before, streams_of_rank
from forgather.ml.trainer.bad_rows import BadRows
from forgather.ml.trainer.batch_sampler import RankShare
from forgather.ml.trainer.data_fingerprint import SAMPLED, Fingerprint, row_digest
from forgather.ml.trainer.data_rng import IsolatedRNG, seed_of


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
        number: the number of the round.
        rows: the rows, in the order of their streams.
        is_last: whether all streams of the worker have ended.
    """

    worker: int
    number: int
    rows: list[Given]
    is_last: bool


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

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the shards: their number, names, sizes, and digests of some if they have any."""
        shards = self.source.shards
        digest = getattr(shards, "shard_digest", lambda shard: "")
        numbers = [shards.num_shards * place // SAMPLED for place in range(SAMPLED)]
        facts = [
            (shards.num_shards, shards.shard_name(shard), shards.shard_size(shard), digest(shard))
            for shard in dict.fromkeys(numbers)
        ]
        return Fingerprint(None, {"shard": tuple(row_digest(list(map(str, fact))) for fact in facts)})

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
        streams = {number: self._opened(number, orders[number], seed, epoch, start) for number in mine}
        for number in itertools.count(start // self._num_streams):
            rows: list[Given] = []
            for stream in list(streams):
                place = number * self._num_streams + stream
                if place < start:
                    continue
                found = next(streams[stream], None)
                if found is None:
                    del streams[stream]
                    continue
                is_own = place % self._share.size in self.replicas
                rows.append(Given(stream, found[0] if is_own else None, _with_arrays(found[1])))
            yield Round(worker, number, rows, not streams)
            if not streams:
                return

    def _opened(
        self, number: int, order: list[int], seed: int, epoch: int, start: int
    ) -> Iterator[tuple[Any, Block | None]]:
        def seeded(*facts: int) -> AbstractContextManager[None]:
            return self._apart.seeded(seed_of(seed, *facts))

        block = self._blocks.get(number, Block()) if start else Block()
        rows = iter(VirtualStream(self.source, order, number, epoch, start=block, guard=self._guard, seeded=seeded))
        past = rounds_before(start, number, self._num_streams) - block.first
        latest = None
        for given, (row, begins) in enumerate(rows):
            if begins is not None:
                latest = dataclasses.replace(begins, digest=row_digest(row))
            if given >= past:
                # With the first row, the block in which it is: the rows before it are given again from there only.
                yield row, latest
                latest = None

    def __getattr__(self, name: str) -> Any:
        # Pickling looks up special methods on a copy that has no attributes yet: it would recurse for ever.
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _with_arrays(block: Block | None) -> Block | None:
    # A tensor would be sent to the main process in a file of shared memory of its own.
    return block if block is None else dataclasses.replace(block, packer=as_arrays(block.packer))


def as_arrays(tree: Any) -> Any:
    """Returns a tree of mappings in which tensors are arrays."""
    if isinstance(tree, Mapping):
        return {name: as_arrays(item) for name, item in tree.items()}
    return tree.numpy() if isinstance(tree, Tensor) else tree
