"""Virtual streams: the fixed order in which the shards of a data set are read, whatever the number of ranks.

Takes shards (`ml.data.shards`) and a number of virtual streams; gives the rows of each stream, with a position. The
shards of an epoch are dealt to the streams, and row `k` of an epoch is the next row of stream `k mod V`. A rank that
computes every `R`-th row reads `V / gcd(R, V)` whole streams: if `R` divides `V`, each row is read by one rank. A
stream that has ended leaves its places empty, so no stream depends on another one.

A stream is read in blocks of rows, which are shuffled, prepared (tokenized) and packed. The position of a stream is the
begin of its block (shard, offset, state of the packer) and the number of rows of the block that were given.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import xxhash

from forgather.errors import ForgatherError
from forgather.ml.data.data_errors import file_unreadable
from forgather.ml.data.line_parts import located
from forgather.ml.data.read_log import RawRows, ReadLog, RowDigests, is_read_again, stamp_of
from forgather.ml.data.row_epoch import reading_block
from forgather.ml.data.row_guard import Outcome, RowGuard
from forgather.ml.data.shards import Offset, Packer, Row, ShardedRows, ShardReader, segment_of

AUTOMATIC = 64
_MOST_AUTOMATIC = 1024

Prepare = Callable[[Iterator[Row]], Iterator[Row]]


def automatic_streams(replicas: int, limit: int | None = None) -> int:
    """Returns the number of virtual streams of a new run: 64 if the replicas divide it, otherwise a multiple of them.

    Args:
        replicas: the number of data-parallel ranks.
        limit: the largest number that the data allows; None for any.

    Example:
        >>> [automatic_streams(replicas) for replicas in (1, 8, 12, 64, 100, 512)]
        [64, 64, 192, 64, 100, 512]
        >>> automatic_streams(8, limit=20), automatic_streams(12, limit=20), automatic_streams(12, limit=5)
        (16, 12, 4)
    """
    whole = math.lcm(AUTOMATIC, replicas)
    wanted = whole if whole <= _MOST_AUTOMATIC else replicas * math.ceil(AUTOMATIC / replicas)
    if limit is None or wanted <= limit:
        return wanted
    # A power of two first, which is the same for most numbers of replicas.
    power = 1 << (max(limit, 1).bit_length() - 1)
    return power if power % replicas == 0 or replicas > limit else limit - limit % replicas


def even_streams(replicas: int, shards: int) -> int:
    """Returns the number of streams for shards that cannot be divided: one that deals them most evenly.

    Args:
        replicas: the number of data-parallel ranks.
        shards: the number of shards.

    Returns:
        A multiple of `replicas`, at most `shards`; 1 if there are fewer shards than replicas.

    Example:
        >>> even_streams(1, 100), even_streams(8, 100), even_streams(8, 64), even_streams(8, 3)
        (50, 8, 64, 1)
    """
    if shards < replicas:
        return 1
    most = min(automatic_streams(replicas), shards)
    # A stream with more shards than the others goes on alone at the end of an epoch.
    return min(range(replicas, most + 1, replicas), key=lambda count: (math.ceil(shards / count) * count, -count))


def reads_per_row(num_streams: int, replicas: int) -> int:
    """Returns how many ranks read each row, of which one uses it.

    Example:
        >>> reads_per_row(64, 8), reads_per_row(64, 12), reads_per_row(1, 8)
        (1, 3, 8)
    """
    return replicas // math.gcd(num_streams, replicas)


def streams_of_rank(num_streams: int, rank: int, replicas: int) -> range:
    """Returns the numbers of the streams that a rank reads.

    Args:
        num_streams: the number of virtual streams.
        rank: the data-parallel rank.
        replicas: the number of data-parallel ranks.

    Example:
        >>> list(streams_of_rank(8, 1, 4)), list(streams_of_rank(4, 5, 6))
        ([1, 5], [1, 3])
    """
    apart = math.gcd(num_streams, replicas)
    return range(rank % apart, num_streams, apart)


def rounds_before(row: int, stream: int, num_streams: int) -> int:
    """Returns how many rows of a stream are among the first `row` rows of an epoch.

    Example:
        >>> [rounds_before(6, stream, 4) for stream in range(4)]
        [2, 2, 1, 1]
    """
    return max(0, -(-(row - stream) // num_streams))


def dealt(sizes: Sequence[int], num_streams: int, draw: np.random.Generator | None) -> list[list[int]]:
    """Returns the numbers of the shards of each stream, which have similar sizes in total.

    Args:
        sizes: the size of each shard.
        num_streams: the number of virtual streams.
        draw: the generator that shuffles the shards; None for their own order.

    Example:
        >>> dealt([1, 1, 1, 1, 1], 2, None), dealt([1, 1, 4], 2, None)
        ([[0, 2, 4], [1, 3]], [[2], [0, 1]])
    """
    order = list(range(len(sizes))) if draw is None else draw.permutation(len(sizes)).tolist()
    place = {shard: number for number, shard in enumerate(order)}
    streams: list[list[int]] = [[] for _ in range(num_streams)]
    loads = [(0, number) for number in range(num_streams)]
    # The largest first, each to the stream that has least; equal ones stay in order.
    for shard in sorted(order, key=lambda shard: -sizes[shard]):
        load, number = heapq.heappop(loads)
        streams[number].append(shard)
        heapq.heappush(loads, (load + max(1, sizes[shard]), number))
    return [sorted(shards, key=place.__getitem__) for shards in streams]


@dataclass(frozen=True, slots=True)
class Block:
    """The begin of a block of a stream, from which the stream can be read on.

    Args:
        place: the number of the shard in the order of the stream.
        offset: the offset in this shard.
        first: the number of rows that the stream gave before this block, in this epoch.
        packer: the state of the packer; None without one.
        num_bad: the number of bad rows that were left out before this block.
        digest: a digest of the first row of the block; None if it is unknown.
        raw: digests of what was read of the shard; None if they are unknown.
    """

    place: int = 0
    offset: Offset = None
    first: int = 0
    packer: Mapping[str, Any] | None = None
    num_bad: int = 0
    digest: str | None = None
    raw: RawRows | None = None

    def to_state(self) -> dict[str, Any]:
        """Returns the block as numbers, texts, lists and tensors."""
        return {
            "place": self.place,
            "offset": self.offset,
            "first": self.first,
            "packer": None if self.packer is None else dict(self.packer),
            "bad": self.num_bad,
            "digest": self.digest,
            "raw": None if self.raw is None else asdict(self.raw),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Block:
        """Returns the block that `to_state` described."""
        return cls(
            int(state["place"]),
            state["offset"],
            int(state["first"]),
            state["packer"],
            int(state["bad"]),
            state.get("digest"),
            RawRows(**state["raw"]) if state.get("raw") else None,
        )


@dataclass(frozen=True, slots=True)
class StreamSource:
    """What virtual streams read, and how.

    Args:
        shards: the shards.
        prepares: the functions that make rows of other rows, such as one that tokenizes, in turn. They get one block at
            a time, and keep nothing between blocks.
        make_packer: a function that returns a new packer for a stream; None for rows that are not packed.
        block_rows: the number of rows of a block.
        shuffled: whether shards and the rows of a block are shuffled.
        seed: the seed of the shuffling.
    """

    shards: ShardedRows
    prepares: Sequence[Prepare] = ()
    make_packer: Callable[[], Packer] | None = None
    block_rows: int = 64
    shuffled: bool = True
    seed: int = 0

    def orders(self, num_streams: int, epoch: int) -> list[list[int]]:
        """Returns the numbers of the shards of each stream in an epoch."""
        sizes = [self.shards.shard_size(shard) for shard in range(self.shards.num_shards)]
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch])) if self.shuffled else None
        return dealt(sizes, num_streams, draw)


class VirtualStream:
    """The rows of one virtual stream in an epoch. Each item is a row, and the block that begins with it, if one does.

    Args:
        source: what is read.
        order: the numbers of the shards of this stream, in order.
        number: the number of the stream.
        epoch: the number of the epoch.
        start: the block with which to begin.
        guard: the object that decides what happens after an error.
        seeded: a context manager for a block, given integers that tell the block from all others, in whose body random
            numbers are drawn apart; None to draw from the global state.
        digests: the functions that make digests of what was read; None for blocks without them.

    Attributes:
        num_read: the number of rows that were read from shards.
        change: how the rows before `start`, or of its block, differ from what it says of them, as far as they were
            compared while the stream was read; None if they do not.
    """

    def __init__(
        self,
        source: StreamSource,
        order: Sequence[int],
        number: int,
        epoch: int,
        *,
        start: Block | None = None,
        guard: RowGuard | None = None,
        seeded: Callable[..., AbstractContextManager[Any]] | None = None,
        digests: RowDigests | None = None,
    ) -> None:
        self._source, self._order, self._number, self._epoch = source, order, number, epoch
        self._start = start or Block()
        self._guard = guard or RowGuard()
        self._seeded = seeded or (lambda *_: nullcontext())
        self._digests = digests
        self._log = ReadLog(digests)
        self.change: str | None = None
        self._reader: ShardReader | None = None
        self._num_bad = self._start.num_bad
        self.num_read = 0

    def __iter__(self) -> Iterator[tuple[Row, Block | None]]:
        source = self._source
        packer = None if source.make_packer is None else source.make_packer()
        if packer is not None and self._start.packer is not None:
            packer.load_state_dict(self._start.packer)
        given, place, offset = self._start.first, self._start.place, self._start.offset
        self._reader = None
        raw = self._start.raw
        if raw is not None and offset is not None and place < len(self._order):
            self._compare_before(raw)
        while place < len(self._order):
            block = Block(place, offset, given, None if packer is None else packer.state_dict(), self._num_bad)
            if offset is None:
                self._log.open(stamp_of(source.shards, self._order[place]))
            key = self._key(place, offset)
            with self._seeded(*key):
                rows, following, read = self._block(self._order[place], offset, key)
                self._compare_block(raw, read)
                block, raw = replace(block, raw=read), None
                place, offset = (place + 1, None) if following is _END else (place, following)
                if packer is not None:
                    rows = packer.add([segment_of(row) for row in rows])
                    rows = [*rows, *packer.finish()] if place == len(self._order) else rows
            for number, row in enumerate(rows):
                yield row, block if number == 0 else None
            given += len(rows)

    def _key(self, place: int, offset: Offset) -> tuple[int, ...]:
        return self._epoch, self._number, place, _number_of(offset)

    def _compare_before(self, raw: RawRows) -> None:
        """Reads the rows of the shard before the start again, if they may be other ones, and compares them."""
        shards, place = self._source.shards, self._start.place
        stamp = stamp_of(shards, self._order[place])
        self._log.go_on(raw, stamp)
        if not is_read_again(raw, stamp):
            return
        again = VirtualStream(
            *(self._source, self._order, self._number, self._epoch),
            guard=self._guard.uncounted(),
            seeded=self._seeded,
            digests=self._digests,
        )
        if not again._reads_before(raw, place):
            self.change = f"{shards.shard_name(self._order[place])} has other rows before the position"
            self._log.stop()

    def _reads_before(self, raw: RawRows, place: int) -> bool:
        """Reads a shard up to a number of rows, and returns whether they are those of a checkpoint."""
        self._log.open(None)
        offset: Offset = None
        while self._log.count < raw.count:
            with self._seeded(*self._key(place, offset)):
                rows, is_last = self._read(self._order[place], offset)
            self._log.add(rows)
            if is_last or self._reader is None:
                break
            offset = self._reader.offset
        return self._log.agrees(raw)

    def _compare_block(self, expected: RawRows | None, read: RawRows | None) -> None:
        """Compares the block of the start, which is the first one that is read."""
        if expected is not None and read is not None and expected.content != read.content and self.change is None:
            name = self._source.shards.shard_name(self._order[self._start.place])
            self.change = f"{name} has other rows at the position"
            self._log.stop()

    def _block(self, shard: int, offset: Offset, key: Sequence[int]) -> tuple[list[Row], Offset, RawRows | None]:
        """Returns the prepared rows of the block at an offset of a shard, the offset after it, and what was read."""
        rows, is_last = self._read(shard, offset)
        read = self._log.add(rows)
        following = _END if is_last or self._reader is None else self._reader.offset
        if is_last:
            self._reader = None
        if self._source.shuffled:
            draw = np.random.Generator(np.random.PCG64([self._source.seed, *key]))
            rows = [rows[number] for number in draw.permutation(len(rows))]
        with reading_block():
            for prepare in self._source.prepares:
                rows = self._prepared(prepare, rows, shard)
        return rows, following, read

    def _read(self, shard: int, offset: Offset) -> tuple[list[Row], bool]:
        # Kept open from block to block: some formats can only be read on, and not from any place at once.
        reader = self._reader or self._source.shards.open(shard, offset)
        rows: list[Row] = []
        failed = 0
        while len(rows) < self._source.block_rows:
            try:
                with reading_block():
                    rows.append(next(reader))
                failed = 0
            except StopIteration:
                self.num_read += len(rows)
                return rows, True
            except Exception as error:
                name = self._source.shards.shard_name(shard)
                can_skip = bool(getattr(reader, "goes_on", False))
                outcome = self._guard.reading(located(error), name, failed, can_skip=can_skip)
                if outcome is Outcome.RAISE and isinstance(error, OSError) and not isinstance(error, ForgatherError):
                    raise file_unreadable(name, error) from error
                if outcome is Outcome.RAISE:
                    raise error from None
                failed = 0 if outcome is Outcome.SKIP else failed + 1
                self._num_bad += outcome is Outcome.SKIP
                reader = self._source.shards.open(shard, reader.offset)
        self.num_read += len(rows)
        self._reader = reader
        return rows, False

    def _prepared(self, prepare: Prepare, rows: list[Row], shard: int) -> list[Row]:
        try:
            return list(prepare(iter(rows)))
        except Exception as whole:  # noqa: BLE001 - raised again, unless the policy is to leave bad rows out
            if not self._guard.skips:
                raise located(whole) from None
        made: list[Row] = []
        # Row by row, so that those next to a bad one are kept.
        for row in rows:
            try:
                made += list(prepare(iter([row])))
            except Exception as error:
                if self._guard.preparing(located(error), self._source.shards.shard_name(shard)) is Outcome.RAISE:
                    raise error from None
                self._num_bad += 1
        return made


_END: Any = object()


def _number_of(offset: Offset) -> int:
    """Returns a number that stands for an offset."""
    if offset is None:
        return 0
    if isinstance(offset, int):
        return offset
    return xxhash.xxh3_64_intdigest(json.dumps(offset, sort_keys=True).encode())
