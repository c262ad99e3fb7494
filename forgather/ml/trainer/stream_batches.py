"""Reads the rank-local rows of a stream by virtual streams, in worker processes or in this one, with a position.

Takes a `RowStream` and a share; gives the rows of each global micro-batch that this rank computes. Row `k` of an epoch
is computed by rank `k mod R`, from stream `k mod V` (`ml.data.virtual_streams`). A row that a stream does not have
leaves its place empty. Workers have whole streams, and give their rows round by round; so neither their number nor the
number of ranks changes the rows of a micro-batch. The position of each stream is known for every row that was given,
also while workers read ahead.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, _utils

from forgather.errors import TrainingError, first_line
from forgather.ml.data.row_epoch import next_in_epoch, reading_epoch
from forgather.ml.data.row_stream import RowStream
from forgather.ml.data.virtual_streams import Block, VirtualStream, reads_per_row, rounds_before, streams_of_rank
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.ml.trainer.bad_rows import BadRows
from forgather.ml.trainer.batch_sampler import RankShare
from forgather.ml.trainer.data_rng import IsolatedRNG, seed_of
from forgather.ml.trainer.rank_streams import RankStreams, Round, as_arrays
from forgather.ml.trainer.row_dispatch import Deal, Place, RowDispatch, StepRows, dispatch_of
from forgather.ml.types import PaddingBatch

_log = get_logger(__name__)

Collate = Callable[[list[Any]], Any]
_SHOWN = 3


class RankRows(NamedTuple):
    """The rows of a global micro-batch that this rank computes.

    Args:
        first: the number of rows of the epoch before the micro-batch.
        batch: the collated rows; a `PaddingBatch` if there is none.
        is_last: whether this rank has no further row in this epoch.
    """

    first: int
    batch: Any
    is_last: bool


class StreamBatches:
    """The collated micro-batches of this rank from virtual streams, and the position of the streams.

    Args:
        stream: the rows.
        share: the slice of each global micro-batch that this process computes.
        collate: the collator, a function from a list of rows to a micro-batch.
        options: the options of the `DataLoader`.
        num_streams: the number of virtual streams, at least 1.
        guard: the object that decides what happens to rows that cannot be read.
        generator: the generator from which the loader draws the seeds of its workers.
        inner: the data set that the user gave.
        dispatch: whether rows that several processes of a machine need are read by one of them, and the first global
            rank of the machine.
    """

    def __init__(
        self,
        stream: RowStream,
        share: RankShare,
        collate: Collate,
        options: Mapping[str, Any],
        *,
        num_streams: int,
        guard: BadRows,
        generator: torch.Generator,
        inner: Any,
        dispatch: tuple[bool, int],
    ) -> None:
        self.num_streams = num_streams
        self._dispatches, self._host = dispatch
        self._dispatch: RowDispatch | None = None
        self._is_dispatch_known = False
        # A stream that several replicas read is counted by the first one.
        guard.counts_reads = share.rank < math.gcd(num_streams, share.size)
        self._share, self._collate, self._guard = share, collate, guard
        self._options = {**options, "batch_size": None, "collate_fn": None, "pin_memory": False}
        self._pins = bool(options.get("pin_memory"))
        self._generator = generator
        self.rows = RankStreams(stream, share, num_streams, guard, inner)
        self._history: dict[int, list[Block]] = {}
        self._resumed: dict[int, Block] = {}
        self._trained = 0
        self._bad_before, self._bad_places = 0, list[int]()
        self._changes: dict[int, str] = {}
        self._of_collator = IsolatedRNG()
        self._filler: Any = None
        self._columns: list[str] | None = None
        self.loader = self._new_loader()

    def _new_loader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, generator=self._generator, **self._options)

    @property
    def rank(self) -> int:
        """The data-parallel rank."""
        return self._share.rank

    @property
    def facts(self) -> dict[str, int | None]:
        """What the order of the rows depends on, as a checkpoint stores it."""
        source = self.rows.source
        # Another order has other shards in a place, in which an offset is that of no row.
        order = source.seed if source.shuffled else None
        return {"version": 1, "number": self.num_streams, "block_rows": self.rows.block_rows, "order": order}

    def log_reads(self) -> None:
        """Warns if each row is read by several processes, of which one uses it."""
        times = reads_per_row(self.num_streams, self._share.size)
        if times == 1:
            return
        most, replicas = self.rows.most_streams, self._share.size
        once = "once on each machine and dealt out" if self._dispatches else f"by {times} of {replicas} replicas"
        _log.warning(
            "each row is read %s, and used by one of %s: %s not divide among the replicas; %s lets each read its own",
            once,
            plural(replicas, "replica"),
            plural(self.num_streams, "virtual stream does", "virtual streams do"),
            # Little data has fewer streams than it could have.
            f"data_streams: {replicas} (in a new run)"
            if most is None or most >= replicas
            else f"'fgcli data prepare --num-shards {replicas}', since the data has {plural(most, 'shard')},",
        )

    def read(self, *, seed: int, epoch: int, start: int, sizes: Iterator[int]) -> Iterator[RankRows]:
        """Yields the micro-batches of an epoch from a position on; without end: after the last row, padding.

        Collective, if there are several processes: each must ask for as many micro-batches.

        Args:
            seed: the base seed of the random numbers that are drawn while rows are read.
            epoch: the number of the epoch.
            start: the number of rows of the epoch that are trained on already, over all ranks.
            sizes: the numbers of micro-batches of the next optimizer steps, without end.
        """
        self._find_dispatch()
        blocks, self._resumed = (self._resumed if start else {}), {}
        is_reader = self._dispatch is None or self._dispatch.is_reader
        self._history = {number: [block] for number, block in blocks.items() if is_reader}
        self._trained = start
        self._bad_before, self._bad_places = (self._bad_before if start else 0), []
        self._guard.begin(sum(block.num_bad for block in blocks.values()), self._bad_before)
        # Of the files as they are now: a change while the run reads them is found at the next resume.
        _ = self.rows.fingerprint
        self.rows.set_position(seed=seed, epoch=epoch, start=start, blocks=blocks)
        if start and self._options.get("persistent_workers"):
            # Workers that are there already do not know the blocks.
            self.loader = self._new_loader()
        cut = StepRows(self._own_rows(start, epoch), self._share, self.rows.replicas, self._guard)
        first, dispatch = start, self._dispatch
        for count in sizes:
            end = first + count * self._share.all_rows
            take = functools.partial(cut.take, end)
            deal = take()[self._share.rank] if dispatch is None else dispatch.deal(take)
            if dispatch is not None and not dispatch.is_reader:
                # What the reader did not know when it sent the rows, this process learns with the next step.
                self._guard.num_read = deal.num_bad
            self._filler = deal.filler if self._filler is None else self._filler
            yield from self._micro_batches(deal, first, end, seed, epoch)
            first = end

    def _micro_batches(self, deal: Deal, first: int, end: int, seed: int, epoch: int) -> Iterator[RankRows]:
        left = collections.deque(deal.rows)
        for place in range(first, end, self._share.all_rows):
            rows = []
            while left and left[0][0] < place + self._share.all_rows:
                rows.append(left.popleft()[1])
            self._filler = rows[-1] if rows else self._filler
            with reading_epoch(epoch):
                batch = self._collated(rows, place, seed_of(seed, epoch, place, self._share.rank))
            yield RankRows(place, batch, deal.is_last and not left)

    def _find_dispatch(self) -> None:
        """Finds out, once, among which processes the rows are dealt out. Collective."""
        if self._is_dispatch_known:
            return
        self._is_dispatch_known = True
        place = Place(collectives.rank(), self._host, self._share.rank)
        self._dispatch = dispatch_of(place, self.num_streams, self._share.size, is_wanted=self._dispatches)
        if self._dispatch is not None:
            self.rows.replicas = self._dispatch.replicas

    def _own_rows(self, start: int, epoch: int) -> Iterator[tuple[int, Any]]:
        """Yields the rows of this rank with their places in the epoch, and records the blocks of the streams."""
        workers = range(self._options["num_workers"] or 1)
        active, waiting = set(workers), dict[int, dict[int, Round]]()
        num_bad = dict[int, int]()
        number = start // self.num_streams
        with_epoch = _in_epoch(iter(self.loader), epoch)
        for part in with_epoch:
            self._changes |= part.changes
            num_bad[part.worker] = part.num_bad
            self._guard.num_read = sum(num_bad.values())
            if part.number < 0:
                continue
            waiting.setdefault(part.number, {})[part.worker] = part
            while active and active <= waiting.get(number, {}).keys():
                parts = waiting.pop(number)
                for given in sorted(
                    itertools.chain(*(part.rows for part in parts.values())), key=lambda one: one.stream
                ):
                    if given.block is not None:
                        self._record(given.stream, given.block)
                    if given.row is not None:
                        yield number * self.num_streams + given.stream, given.row
                active -= {worker for worker, part in parts.items() if part.is_last}
                number += 1
            if not active:
                return

    def _record(self, stream: int, block: Block) -> None:
        known = self._history.setdefault(stream, [])
        if not known or known[-1].first < block.first:
            known.append(block)
        elif known[-1].first == block.first:
            # The block of a checkpoint, which is read again.
            known[-1] = block
        given = rounds_before(self._trained, stream, self.num_streams)
        # Blocks before the one of the position are not needed any more.
        while len(known) > 1 and known[1].first <= given:
            del known[0]

    def _collated(self, rows: list[Any], first: int, seed: int) -> Any:
        with self._of_collator.seeded(seed):
            try:
                batch = self._collate(rows) if rows else PaddingBatch(self._collate([self._any_row()]))
            except Exception as error:
                if not self._guard.skips:
                    self._refuse_other_columns(rows, first, error)
                    raise
                batch = self._collated_singly(rows, first)
        self._columns = self._columns or _columns_of(rows)
        if self._pins:
            batch = _pinned(batch)
        return batch

    def _refuse_other_columns(self, rows: list[Any], first: int, error: Exception) -> None:
        """Raises FG729 if rows that cannot be collated have other columns than the rows before them."""
        every = [found for row in rows if (found := _columns_of([row])) is not None]
        known = self._columns or next(iter(every), None)
        if (other := next((found for found in every if found != known), None)) is not None and known is not None:
            raise TrainingError(
                f"one of the rows {first + 1} to {first + self._share.all_rows} of the epoch has the columns "
                f"{_quoted(other)}, and those before it have {_quoted(known)}: they cannot be collated into one batch "
                f"({type(error).__name__}: {first_line(error)})",
                code="FG729",
                hint="give all shards the same columns, or set bad_rows to leave out rows that cannot be collated",
            ).about("train_dataset") from error

    def _collated_singly(self, rows: list[Any], first: int) -> Any:
        """Returns the micro-batch of the rows that can be collated alone."""
        good = []
        for row in rows:
            try:
                self._collate([row])
            except Exception as error:  # noqa: BLE001 - counted: the policy is to leave bad rows out
                self._guard.collating(error)
                self._bad_places.append(first)
            else:
                good.append(row)
        if good:
            self._filler = good[-1]
            return self._collate(good)
        self._filler = None
        return PaddingBatch(self._collate([self._any_row()]))

    def _any_row(self) -> Any:
        """Returns a row for the shapes of a micro-batch of padding, whose loss is not counted."""
        if self._filler is None:
            shards = list(range(self.rows.source.shards.num_shards))
            guard = BadRows("skip", self._guard.retries)
            for row, _ in VirtualStream(self.rows.source, shards, 0, 0, guard=guard, seeded=self._seeded_apart):
                try:
                    self._collate([row])
                except Exception:
                    if not self._guard.skips:
                        raise
                    continue
                self._filler = row
                break
            else:
                raise TrainingError(
                    "the training data gives no row", code="FG803", hint="check how the data is filtered"
                )
        return self._filler

    @staticmethod
    def _seeded_apart(*facts: int) -> AbstractContextManager[None]:
        return IsolatedRNG().seeded(seed_of(*facts))

    def take_changes(self) -> list[str]:
        """Returns descriptions of the changes of rows since the checkpoint that were noticed since the last call."""
        found, self._changes = self._changes, {}
        shown = [f"stream {stream} gives other rows at the same place: {found[stream]}" for stream in sorted(found)]
        return shown if len(shown) <= _SHOWN else [*shown[:_SHOWN], f"and {len(shown) - _SHOWN} more streams"]

    def trained(self, row: int) -> None:
        """Notes that the model was trained on the first `row` rows of the epoch, over all ranks."""
        self._trained = row

    def num_bad_at(self, row: int) -> int:
        """Returns the number of rows before a position that could not be collated, on this rank.

        Args:
            row: the number of rows of the epoch before the position, over all ranks.
        """
        return self._bad_before + sum(place < row for place in self._bad_places)

    def blocks_at(self, row: int) -> dict[int, dict[str, Any]]:
        """Returns the state of the block of each stream of this rank, in which the stream goes on after a row.

        Args:
            row: the number of rows of the epoch before the position, over all ranks.
        """
        found = {}
        for stream, known in self._history.items():
            given = rounds_before(row, stream, self.num_streams)
            if past := [block for block in known if block.first <= given]:
                found[stream] = _as_tensors(past[-1].to_state())
        return found

    def load_blocks(self, blocks: Mapping[str, Any], num_bad: int) -> None:
        """Sets the blocks in which the streams go on, of which this rank takes its own.

        Args:
            blocks: what `blocks_at` returned on all ranks, by the number of the stream.
            num_bad: the sum of `num_bad_at` over all ranks, which the first one goes on with.
        """
        self._bad_before = num_bad if self._share.rank == 0 else 0
        mine = streams_of_rank(self.num_streams, self._share.rank, self._share.size)
        loaded = {int(number): Block.from_state(as_arrays(state)) for number, state in blocks.items()}
        self._resumed = {number: block for number, block in loaded.items() if number in mine}


def _columns_of(rows: Sequence[Any]) -> list[str] | None:
    """Returns the names of the columns of the first row; None if it has none."""
    return sorted(map(str, rows[0])) if rows and isinstance(rows[0], Mapping) else None


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _in_epoch(rounds: Iterator[Round], epoch: int) -> Iterator[Round]:
    # For rows that are read in this process; a worker stays in the epoch.
    while (found := next_in_epoch(rounds, epoch, None)) is not None:
        yield found


def _as_tensors(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _as_tensors(item) for name, item in tree.items()}
    return torch.from_numpy(tree) if isinstance(tree, np.ndarray) else tree


def _pinned(batch: Any) -> Any:
    pin: Callable[[Any], Any] = _utils.pin_memory.pin_memory
    return PaddingBatch(pin(batch.batch)) if isinstance(batch, PaddingBatch) else pin(batch)
