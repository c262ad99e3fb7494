"""Shards of `datasets.IterableDataset` and of parquet files, see `ml.data.shards.ShardedRows`.

Takes a streamed data set of `datasets`, or files; gives shards. The shards of a data set are its own (usually files),
and those of parquet files are the row groups. A position in a shard is what `datasets` stores of it, or a number of
rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow.parquet as pq
from torch.utils.data import _utils

from forgather.ml.data.shards import Offset, Row

_BATCH_ROWS = 256


def is_streamed_dataset(dataset: Any) -> bool:
    """Returns whether a data set is one of `datasets` that is read as a stream, with shards that can be read alone."""
    needed = ("shard", "num_shards", "set_epoch", "state_dict", "load_state_dict")
    return type(dataset).__module__.startswith("datasets.") and all(hasattr(dataset, name) for name in needed)


def has_shuffle_buffer(examples: Any) -> bool:
    """Returns whether the examples of a data set of `datasets` are drawn from a buffer, which no position includes.

    Args:
        examples: the attribute `_ex_iterable` of the data set; None for another one.
    """
    if examples is None:
        return False
    inside = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())]
    return type(examples).__name__.startswith("BufferShuffled") or any(map(has_shuffle_buffer, inside))


class DatasetShards:
    """The shards of a `datasets.IterableDataset`.

    Args:
        dataset: the data set.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch = 0
        self._has_buffer = has_shuffle_buffer(getattr(dataset, "_ex_iterable", None))

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return int(self._dataset.num_shards)

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch, on which the order of a data set that is shuffled depends."""
        self._epoch = epoch

    def shard_size(self, shard: int) -> int:
        """Returns 1: the sizes of shards are not known."""
        return 1

    def shard_name(self, shard: int) -> str:
        """Returns the number of the shard."""
        return f"shard {shard} of {self.num_shards}"

    def open(self, shard: int, offset: Offset = None) -> _DatasetReader:
        """Returns the rows of a shard from an offset on.

        Rows that are drawn from a buffer of `datasets` are read from the beginning of the shard again.

        Args:
            shard: the number of the shard.
            offset: the state of the data set, or the number of rows to read past.
        """
        part = self._dataset.shard(num_shards=self.num_shards, index=shard)
        part.set_epoch(self._epoch)
        return _DatasetReader(part, offset, counts=self._has_buffer)


class _DatasetReader:
    def __init__(self, part: Any, offset: Offset, *, counts: bool) -> None:
        self._part, self._counts = part, counts
        self._given = int(offset or 0) if counts else 0
        if offset is not None and not counts:
            part.load_state_dict(offset)
        self._rows = _outside_of_worker(part)
        if self._given:
            next(islice(self._rows, self._given - 1, None), None)

    @property
    def offset(self) -> Offset:
        return self._given if self._counts else self._part.state_dict()

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        row: Row = next(self._rows)
        self._given += 1
        return row


def _outside_of_worker(part: Any) -> Iterator[Row]:
    """Yields the rows of a shard. `datasets` would divide them among the workers, which have whole shards here."""
    rows = iter(part)
    worker = _utils.worker._worker_info
    _utils.worker._worker_info = None
    try:
        # It asks for the worker when the first row is read.
        first = next(rows, _outside_of_worker)
    finally:
        _utils.worker._worker_info = worker
    if first is not _outside_of_worker:
        yield first  # type: ignore[misc]
        yield from rows


class ParquetShards:
    """The row groups of parquet files.

    Args:
        files: the files.
        columns: the columns that are read; None for all.
    """

    def __init__(self, files: Sequence[str], columns: Sequence[str] | None = None) -> None:
        self._columns = None if columns is None else list(columns)
        self._groups: list[tuple[str, int, int]] = []
        for file in files:
            facts = pq.read_metadata(file)
            self._groups += [(file, number, facts.row_group(number).num_rows) for number in range(facts.num_row_groups)]

    @property
    def num_shards(self) -> int:
        """The number of row groups."""
        return len(self._groups)

    def shard_size(self, shard: int) -> int:
        """Returns the number of rows of a row group."""
        return self._groups[shard][2]

    def shard_name(self, shard: int) -> str:
        """Returns the name of the file, and the number of the row group."""
        file, number, _ = self._groups[shard]
        return f"{os.path.basename(file)}, row group {number}"

    def open(self, shard: int, offset: Offset = None) -> _GroupReader:
        """Returns the rows of a row group from a number of rows on."""
        file, number, _ = self._groups[shard]
        return _GroupReader(file, number, self._columns, int(offset or 0))


class _GroupReader:
    def __init__(self, file: str, group: int, columns: list[str] | None, offset: int) -> None:
        self.offset = offset
        self._rows = islice(self._read(file, group, columns), offset, None)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        row = next(self._rows)
        self.offset += 1
        return row

    @staticmethod
    def _read(file: str, group: int, columns: list[str] | None) -> Iterator[Row]:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
                yield from batch.to_pylist()
