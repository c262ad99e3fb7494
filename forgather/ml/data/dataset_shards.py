"""Shards of a `datasets.IterableDataset`, see `ml.data.shards.ShardedRows`.

Takes a streamed data set of `datasets`; gives its own shards, which usually are files. A position in a shard is what
`datasets` stores of it, or a number of rows. The library itself is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import xxhash
from torch.utils.data import _utils

from forgather.ml.data.file_content import file_stamp, sampled_digest
from forgather.ml.data.shards import Offset, Row


def is_streamed_dataset(dataset: Any) -> bool:
    """Returns whether a data set is one of `datasets` that is read as a stream, with shards that can be read alone."""
    needed = ("shard", "num_shards", "set_epoch", "state_dict", "load_state_dict")
    return type(dataset).__module__.startswith("datasets.") and all(hasattr(dataset, name) for name in needed)


def has_shuffle_buffer(examples: Any) -> bool:
    """Returns whether the examples of a data set of `datasets` are drawn from a buffer, which no position includes.

    Args:
        examples: the attribute `_ex_iterable` of the data set; None for another one.
    """
    return any(type(part).__name__.startswith("BufferShuffled") for part in parts_of(examples))


def parts_of(examples: Any) -> Iterator[Any]:
    """Yields the examples of a data set of `datasets`, and those that they are made of.

    Args:
        examples: the attribute `_ex_iterable` of the data set; None for another one.
    """
    if examples is None:
        return
    yield examples
    for inner in (getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())):
        yield from parts_of(inner)


def _shuffle_digest(examples: Any) -> str:
    """Returns a digest of the generators by which a data set of `datasets` is shuffled; "" if it is not.

    Without a seed they differ in each process and in each run, and so do the rows at a place.
    """
    generators: list[Any] = [getattr(part, "generator", None) for part in parts_of(examples)]
    states = [one.bit_generator.state for one in generators if hasattr(one, "bit_generator")]
    return xxhash.xxh3_64_hexdigest(repr(states).encode()) if states else ""


def _named_files(dataset: Any) -> list[str]:
    """Returns the files and addresses that a data set of `datasets` reads, in the order of its shards."""
    kwargs = [getattr(one, "kwargs", None) or {} for one in parts_of(getattr(dataset, "_ex_iterable", None))]
    values = (value for given in kwargs for value in given.values())
    named = (one for value in values for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))
    # A file that is gone still has a name, so a folder in it tells it from other texts.
    return [text for text in dict.fromkeys(named) if "://" in text or os.path.isabs(text) or os.path.isfile(text)]


class DatasetShards:
    """The shards of a `datasets.IterableDataset`.

    Args:
        dataset: the data set.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch = 0
        examples = getattr(dataset, "_ex_iterable", None)
        self._has_buffer = has_shuffle_buffer(examples)
        self._shuffled_by = _shuffle_digest(examples)
        self._known_sources: dict[int, list[str]] = {}

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

    def recorded_name(self, shard: int) -> str:
        """Returns the name of a shard that checkpoints compare: those of an earlier release knew no files."""
        return f"shard {shard} of {self.num_shards}"

    def shard_name(self, shard: int) -> str:
        """Returns the number of the shard, and its file if it has one."""
        files = [os.path.basename(file) for file in self._sources(shard)]
        return self.recorded_name(shard) + (f" ({', '.join(files[:2])})" if files else "")

    def content_digest(self, shard: int) -> str:
        """Returns the sizes of the local files of a shard, and a digest of samples of them; "" if it has none."""
        files = [file for file in self._sources(shard) if os.path.isfile(file)]
        return " ".join(f"{os.path.getsize(file)} {sampled_digest(file)}" for file in files)

    def shard_stamp(self, shard: int) -> str:
        """Returns a text that changes when a file of a shard is written again; "" if it has no file."""
        stamps = list(map(file_stamp, self._sources(shard)))
        return "; ".join(stamps) if all(stamps) else ""

    def listing(self) -> list[str]:
        """Returns the names and sizes of all files, without asking for each shard."""
        found = _named_files(self._dataset)
        sizes = [os.path.getsize(file) if os.path.isfile(file) else "unknown" for file in found]
        files = [f"{os.path.basename(file)}, size {size}" for file, size in zip(found, sizes, strict=True)]
        return files or [self.recorded_name(shard) for shard in range(self.num_shards)]

    def _sources(self, shard: int) -> list[str]:
        """Returns the files and addresses of a shard, in the order in which its parts name them."""
        if shard not in self._known_sources:
            part = self._dataset.shard(num_shards=self.num_shards, index=shard)
            self._known_sources[shard] = _named_files(part)
        return self._known_sources[shard]

    def shard_digest(self, shard: int) -> str:
        """Returns a digest of what shuffles the rows of a shard, beside the epoch; "" if nothing does."""
        return self._shuffled_by

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
