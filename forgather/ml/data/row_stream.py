"""Streamed rows: rows of files that are read, checked and tokenized while a run trains on them.

Takes files and a function that reads them; gives an iterable data set. Memory holds a buffer of rows, and nothing is
cached. An epoch has each row once, in an order that depends on the seed and the number of the epoch alone; worker
processes divide the rows among them. The trainer divides them among ranks, and reads them again after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from forgather.ml.data.data_errors import DataError
from forgather.whole_rows import whole_row_hints

Row = Mapping[str, Any]

BUFFER_SIZE = 10_000


class RowStream(IterableDataset[Row]):
    """The rows of files, which are read from the beginning in each epoch.

    Args:
        files: the files.
        read: a function that yields the rows of files, in order. It must be picklable, for worker processes.
        buffer_size: the number of rows among which the next one is drawn at random; 0 for the order of the files.
        seed: the seed of the order.

    Attributes:
        column_names: the names of the columns, which are those of the first row.
        is_shuffled: whether the rows are read in a random order.
        info: what was done with the rows, as the attribute of this name of `datasets.Dataset`; None for raw rows.

    Raises:
        DataError: FG832 if there is no row, and what `read` raises at the first one.
    """

    def __init__(
        self, files: Sequence[str], read: Callable[[Sequence[str]], Iterator[Row]], *, buffer_size: int, seed: int
    ) -> None:
        self._files, self._read = list(files), read
        self._buffer_size, self._seed = buffer_size, seed
        self._epoch = _shared_number(0)
        self._prepare: Callable[[Iterator[Row]], Iterator[Row]] | None = None
        self.is_shuffled = buffer_size > 0
        self.info: Any = None
        # In the order of the files: a shuffled stream would fill its buffer first.
        first = next(iter(read(self._files)), None)
        if first is None:
            found, hint = ", ".join(self._files[:3]), "a data set needs at least one row"
            raise DataError(f"{found} gives no row", code="FG832", hint=hint)
        self.column_names = list(first)

    def prepared(
        self, prepare: Callable[[Iterator[Row]], Iterator[Row]], column_names: Sequence[str], info: Any = None
    ) -> RowStream:
        """Returns the stream of the rows that a function makes of these, such as one that tokenizes.

        Args:
            prepare: a function from an iterator of rows to an iterator of other rows. It must be picklable.
            column_names: the columns of the new rows.
            info: the attribute `info` of the new stream.
        """
        made = RowStream.__new__(RowStream)
        made.__dict__ |= self.__dict__
        made._prepare = prepare if self._prepare is None else partial(_in_turn, self._prepare, prepare)
        made.column_names, made.info = list(column_names), info
        made._epoch = _shared_number(int(self._epoch))
        return made

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
        return rows if self._prepare is None else self._prepare(rows)


def _shared_number(value: int) -> torch.Tensor:
    """Returns a number in shared memory, which persistent workers, each with a copy of the stream, see change."""
    number = torch.tensor(value)
    number.share_memory_()  # type: ignore[no-untyped-call]
    return number


def _in_turn(first: Callable[[Any], Any], second: Callable[[Any], Any], rows: Iterator[Row]) -> Any:
    return second(first(rows))


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
