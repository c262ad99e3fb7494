"""The epoch in which rows are read, for data sets whose rows are others in each epoch.

The epoch travels with the request for rows: the trainer sends it to the process that reads them, and a data set asks
for it while it makes a row. So it is not part of the data set, which training and evaluation may share, and of which
every worker process has a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset

T = TypeVar("T")
D = TypeVar("D")

_epoch: ContextVar[int] = ContextVar("epoch", default=0)


@contextmanager
def reading_epoch(epoch: int) -> Iterator[None]:
    """Context manager in whose body rows are those of an epoch; elsewhere they are those of epoch 0.

    Args:
        epoch: the number of the epoch, from 0.

    Example:
        >>> class Epochs(EpochDataset):
        ...     def __getitem__(self, row):
        ...         return row, self.epoch
        >>> with reading_epoch(2):
        ...     inside = Epochs()[5]
        >>> inside, Epochs()[5]
        ((5, 2), (5, 0))
    """
    before = _epoch.set(epoch)
    try:
        yield
    finally:
        _epoch.reset(before)


def next_in_epoch(rows: Iterator[T], epoch: int, default: D) -> T | D:
    """Returns the next item of an iterator that reads rows, which are those of an epoch.

    Args:
        rows: the iterator.
        epoch: the number of the epoch, from 0.
        default: what is returned if there is no further item.

    Example:
        >>> epochs = (EpochDataset().epoch for _ in range(2))
        >>> next_in_epoch(epochs, 2, None), next(epochs)
        (2, 0)
    """
    # Like `with reading_epoch`, without a generator: it is called for each micro-batch.
    before = _epoch.set(epoch)
    try:
        return next(rows, default)
    finally:
        _epoch.reset(before)


def stay_in_epoch(epoch: int) -> None:
    """Makes rows those of an epoch until the next call, for a process that does nothing but read them.

    Args:
        epoch: the number of the epoch, from 0.
    """
    _epoch.set(epoch)


_in_block: ContextVar[bool] = ContextVar("in_block", default=False)


@contextmanager
def reading_block() -> Iterator[None]:
    """Context manager in whose body functions that make rows get one block of a stream, and not an epoch."""
    before = _in_block.set(True)
    try:
        yield
    finally:
        _in_block.reset(before)


def is_block() -> bool:
    """Returns whether the rows that are made are those of one block, after which nothing is known of the epoch."""
    return _in_block.get()


class EpochDataset(Dataset[Any]):
    """A map-style data set whose rows depend on their number and the epoch alone.

    The trainers read its rows in the epoch that they are in, also in worker processes and within other data sets, such
    as `torch.utils.data.Subset`. An evaluation reads those of epoch 0.
    """

    @property
    def epoch(self) -> int:
        """The epoch in which a row is read now."""
        return _epoch.get()


class TrainingRows(Dataset[Any]):
    """The rows of a map-style data set, read in the epoch of the training, for a loader that does not send the epoch.

    Attributes of the inner data set can be read from this one.

    Args:
        dataset: the inner data set. If it has a method `set_epoch`, it gets the epoch before its rows are read.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # Persistent workers keep a copy of this object: shared memory tells them the next epoch.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def begin_epoch(self, epoch: int) -> None:
        """Sets the epoch of the rows that are read next, in this process and in those of workers."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[Any]) -> Any:
        """Returns several rows, which some data sets read faster than one by one."""
        epoch = int(self._epoch)
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        several = getattr(self.dataset, "__getitems__", None)
        with reading_epoch(epoch):
            return several(rows) if several is not None else [self.dataset[row] for row in rows]

    def __getattr__(self, name: str) -> Any:
        # Pickling looks up attributes on a copy that has none yet: looking for `dataset` would recurse for ever.
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self.dataset, name)
