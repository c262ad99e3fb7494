"""Streamed rows: rows of files that are read, checked and tokenized while a run trains on them.

Takes files, or shards (`ml.data.shards`); gives an iterable data set. Memory holds a buffer of rows, and nothing is
cached. The trainer reads a stream by virtual streams (`source`), of which each rank reads its own. A loop over the data
set itself, and a run that was begun before there were virtual streams, gives each row once, in an order that depends on
the seed and the number of the epoch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from forgather.ml.data.data_errors import DataError
from forgather.ml.data.dataset_shards import DatasetShards, is_streamed_dataset
from forgather.ml.data.line_parts import Line, LineParts, ReadLines, located, with_line_numbers
from forgather.ml.data.row_epoch import is_block
from forgather.ml.data.shards import Packer, ShardedRows, segment_of
from forgather.ml.data.virtual_streams import (
    Prepare,
    StreamSource,
    automatic_streams,
    even_streams,
)
from forgather.ml.log import RankLogger
from forgather.whole_rows import whole_row_hints

Row = Mapping[str, Any]

BUFFER_SIZE = 10_000
_IN_ORDER_ROWS = 64
_FEWEST_ROWS = 16
_PARTS = 4
_PART_BYTES = 1 << 20


class RowStream(IterableDataset[Row]):
    """The rows of files or shards, which are read from the beginning in each epoch.

    Args:
        files: the files.
        read: a function that yields the rows of files, in order. It must be picklable, for worker processes.
        buffer_size: the number of rows among which the next one is drawn at random; 0 for the order of the files.
        seed: the seed of the order.
        lines: the function that makes rows of lines, if the files are read by lines. They can then be read by parts.
        shards: the shards, if the rows are not those of lines; None if the stream can only be read as a whole.

    Attributes:
        column_names: the names of the columns, which are those of the first row.
        is_shuffled: whether the rows are read in a random order.
        info: what was done with the rows, as the attribute of this name of `datasets.Dataset`; None for raw rows.

    Raises:
        DataError: FG832 if there is no row, and what `read` raises at the first one.
    """

    def __init__(
        self,
        files: Sequence[str],
        read: Callable[[Sequence[str]], Iterator[Row]],
        *,
        buffer_size: int,
        seed: int,
        lines: ReadLines | None = None,
        shards: ShardedRows | None = None,
    ) -> None:
        self._files, self._read = list(files), read
        self._buffer_size, self._seed = buffer_size, seed
        self._lines, self._shards = lines, shards
        self._epoch = _shared_number(0)
        self._prepares: tuple[Prepare, ...] = ()
        self._make_packer: Callable[[], Packer] | None = None
        self.is_shuffled = buffer_size > 0
        self._keeps_order = not self.is_shuffled
        self.info: Any = None
        # In the order of the files: a shuffled stream would fill its buffer first.
        first = next(iter(read(self._files)), None)
        if first is None:
            found, hint = ", ".join(self._files[:3]) or "the data set", "a data set needs at least one row"
            raise DataError(f"{found} gives no row", code="FG832", hint=hint)
        self.column_names = list(first)

    @classmethod
    def of_lines(cls, files: Sequence[str], lines: ReadLines, *, buffer_size: int, seed: int) -> RowStream:
        """Returns the stream of the rows that a function makes of the lines of files.

        Args:
            files: the files, with one value per line.
            lines: a function from an iterator of lines to an iterator of rows. It must be picklable.
            buffer_size: the number of rows among which the next one is drawn at random; 0 for the order of the files.
            seed: the seed of the order.
        """
        return cls(files, partial(_rows_of_lines, lines), buffer_size=buffer_size, seed=seed, lines=lines)

    @classmethod
    def of_shards(cls, shards: ShardedRows, *, buffer_size: int, seed: int) -> RowStream:
        """Returns the stream of the rows of shards.

        Args:
            shards: the shards.
            buffer_size: the number of rows among which the next one is drawn at random; 0 for the order of the shards.
            seed: the seed of the order.
        """
        numbers = [str(shard) for shard in range(shards.num_shards)]
        return cls(numbers, partial(_rows_of_shards, shards), buffer_size=buffer_size, seed=seed, shards=shards)

    def prepared(self, prepare: Prepare, column_names: Sequence[str], info: Any = None) -> RowStream:
        """Returns the stream of the rows that a function makes of these, such as one that tokenizes.

        Args:
            prepare: a function from an iterator of rows to an iterator of other rows. It must be picklable.
            column_names: the columns of the new rows.
            info: the attribute `info` of the new stream.
        """
        made = self._with(column_names, info)
        made._prepares = (*self._prepares, prepare)
        return made

    def packed(self, make_packer: Callable[[], Packer], column_names: Sequence[str], info: Any = None) -> RowStream:
        """Returns the stream of the rows that a packer makes of these, which have tokens. It cannot be prepared again.

        Args:
            make_packer: a function that returns a new packer, see `ml.data.shards.Packer`. It must be picklable.
            column_names: the columns of the new rows.
            info: the attribute `info` of the new stream.
        """
        made = self._with(column_names, info)
        made._make_packer = make_packer
        return made

    def _with(self, column_names: Sequence[str], info: Any) -> RowStream:
        made = RowStream.__new__(RowStream)
        made.__dict__ |= self.__dict__
        made.column_names, made.info = list(column_names), info
        made._epoch = _shared_number(int(self._epoch))
        return made

    @property
    def most_streams(self) -> int | None:
        """The largest number of virtual streams; None for any, 0 if the stream can only be read as a whole."""
        return None if self._lines is not None else 0 if self._shards is None else self._shards.num_shards

    def usual_streams(self, replicas: int) -> int:
        """Returns the number of virtual streams of a new run; 0 if the stream can only be read as a whole.

        It is 1 if the order of the files is to be kept.

        Args:
            replicas: the number of data-parallel ranks.
        """
        most = self.most_streams
        if most == 0 or self._keeps_order:
            return 0 if most == 0 else 1
        if self._lines is None:
            return even_streams(replicas, most or 1)
        num_bytes = LineParts(self._files, self._lines, 1).num_bytes
        # The streams of little data would end at different times, and leave the last steps with few rows.
        return automatic_streams(replicas, max(1, num_bytes // _PART_BYTES))

    def source(self, num_streams: int) -> StreamSource:
        """Returns what virtual streams read.

        Args:
            num_streams: the number of virtual streams.
        """
        if self._lines is not None:
            # Several parts a stream, so that an epoch puts other places of the files next to one another.
            is_large = LineParts(self._files, self._lines, 1).num_bytes >= _PARTS * num_streams * _PART_BYTES
            parts = num_streams * (_PARTS if is_large and self.is_shuffled else 1)
            shards: ShardedRows = LineParts(self._files, self._lines, parts)
        else:
            assert self._shards is not None, "the stream has shards"  # noqa: S101
            shards = self._shards
        rows = max(self._buffer_size // num_streams, min(self._buffer_size, _FEWEST_ROWS))
        return StreamSource(
            shards,
            self._prepares,
            self._make_packer,
            block_rows=rows if self.is_shuffled else _IN_ORDER_ROWS,
            shuffled=self.is_shuffled,
            seed=self._seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch, on which the order of the rows depends, also for persistent workers."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Row]:
        files = self._files
        # A generator of its own: all processes must read the same order, and the global random state is the model's.
        draw = np.random.Generator(np.random.PCG64([self._seed, int(self._epoch)]))
        if self.is_shuffled:
            files = [files[place] for place in draw.permutation(len(files))]
        rows = self._read(files)
        if self.is_shuffled:
            rows = _shuffled(rows, self._buffer_size, draw)
        # Divided before they are prepared, so that each worker tokenizes its own rows only.
        if (worker := get_worker_info()) is not None:
            rows = islice(rows, worker.id, None, worker.num_workers)
        for prepare in self._prepares:
            rows = prepare(rows)
        return rows if self._make_packer is None else _packed(rows, self._make_packer())


def stream_of(dataset: Any) -> RowStream | None:
    """Returns a data set as a stream that can be read by virtual streams; None if it cannot.

    Args:
        dataset: a `RowStream`, a `datasets.IterableDataset`, or any object that is a `ShardedRows`.
    """
    # Imported here: only those with a data set of `datasets` need its library.
    if isinstance(dataset, RowStream):
        return dataset if dataset.most_streams != 0 else None
    if is_streamed_dataset(dataset):
        return _raw(DatasetShards(dataset), list(dataset.column_names or ()))
    if isinstance(dataset, ShardedRows) and isinstance(dataset, Iterable):
        return _raw(dataset, [])
    return None


def _raw(shards: ShardedRows, column_names: Sequence[str]) -> RowStream:
    """Returns the stream of shards, whose first row is not read beforehand, and which are not shuffled."""
    made = RowStream.__new__(RowStream)
    made._files, made._read = [], partial(_rows_of_shards, shards)
    made._buffer_size, made._seed, made._epoch = 0, 0, _shared_number(0)
    made._lines, made._shards, made._prepares, made._make_packer = None, shards, (), None
    made._keeps_order = False
    made.is_shuffled, made.info, made.column_names = False, None, list(column_names)
    return made


def _rows_of_lines(lines: ReadLines, files: Sequence[str]) -> Iterator[Row]:
    def every() -> Iterator[Line]:
        for file in files:
            with open(file, "rb") as stream:
                place = 0
                for number, text in enumerate(stream, 1):
                    yield Line.of(file, place, text, number)
                    place += len(text)

    rows = lines(every())
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # noqa: BLE001 - raised again, with the number of the line
            raise located(error) from None
        if row is None:
            return
        yield row


def _rows_of_shards(shards: ShardedRows, numbers: Sequence[str]) -> Iterator[Row]:
    for number in numbers:
        yield from shards.open(int(number))


def _packed(rows: Iterator[Row], packer: Packer) -> Iterator[Row]:
    for row in rows:
        yield from packer.add([segment_of(row)])
    yield from packer.finish()


def _shared_number(value: int) -> torch.Tensor:
    """Returns a number in shared memory, which persistent workers, each with a copy of the stream, see change."""
    number = torch.tensor(value)
    number.share_memory_()  # type: ignore[no-untyped-call]
    return number


def _shuffled(rows: Iterator[Row], size: int, draw: np.random.Generator) -> Iterator[Row]:
    buffer = list(islice(rows, size))
    for row in rows:
        place = int(draw.integers(size))
        row, buffer[place] = buffer[place], row
        yield row
    yield from (buffer[place] for place in draw.permutation(len(buffer)))


def groups(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yields lists of the next `size` items; the last one may be shorter.

    Example:
        >>> list(groups(iter("abc"), 2))
        [['a', 'b'], ['c']]
    """
    while group := list(islice(rows, size)):
        yield group


_warned: set[str] = set()


def warn_of_first(logger: RankLogger, message: str, *, kind: str) -> None:
    """Warns of the first row of an epoch that is left out; of blocks of a stream, once in a process.

    Args:
        logger: the logger.
        message: what is wrong with the row, and its place.
        kind: the kind of such rows.
    """
    if not is_block() or kind not in _warned:
        logger.warning("%s", with_line_numbers(message))
    if is_block():
        _warned.add(kind)


def refuse_stream(dataset: Any, function: str) -> None:
    """Raises FG982 if the rows of a data set are streamed, and a function needs all of them.

    Args:
        dataset: the data set.
        function: the name of the function, which `whole_rows.json` has.
    """
    if isinstance(dataset, RowStream):
        found = f"the rows are streamed, and {function} needs all of them"
        raise DataError(found, code="FG982", hint=whole_row_hints()[function]).about("dataset")


def refuse_stored(dataset: Any, **given: Any) -> None:
    """Raises FG982 if the rows of a data set are streamed, and an argument is given that is for stored rows.

    Args:
        dataset: the data set.
        **given: the values of these arguments, by name.
    """
    if isinstance(dataset, RowStream) and (names := [name for name, value in given.items() if value is not None]):
        why = {
            "num_proc": "they are tokenized by the processes that read them: set dataloader_num_workers",
            "cache_dir": "they are not stored: remove the argument",
        }
        found = f"the rows are streamed, and {names[0]} is for rows that are tokenized before the run"
        raise DataError(found, code="FG982", hint=why[names[0]]).about(names[0])
