"""Repeats a read of rows that failed for a passing reason, after a pause that grows.

Takes a data set whose rows are read by number, or one that is iterated over; gives the same rows, each of them once and
in the same order, and the same random numbers for them. Only errors of the file system and of the network are repeated;
an error about the content of a row is the user's to see. A stream is continued only if it can say its position.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from forgather.ml.data.dataset_shards import parts_of
from forgather.ml.log import get_logger

_log = get_logger(__name__)
T = TypeVar("T")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""The pause before the first repetition, which doubles with each further one, and its limit. Units: seconds."""

# Libraries whose errors are those of a connection, and not all of the class OSError.
_OF_CONNECTIONS = ("httpx", "aiohttp", "urllib3", "botocore")
# Errors about the content of an image, although their class is an OSError.
_OF_CONTENT = ("PIL",)


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    # A read that failed may have drawn numbers before it did, and draws them again.
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def is_passing(error: BaseException) -> bool:
    """Returns whether an error is one of the file system or the network, after which a read may be repeated.

    Example:
        >>> is_passing(TimeoutError("slow")), is_passing(ValueError("bad row"))
        (True, False)
    """
    roots = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if roots & set(_OF_CONTENT):
        return False
    return isinstance(error, OSError) or bool(roots & set(_OF_CONNECTIONS))


class Retries:
    """How often a read may be repeated, and how many reads were. Worker processes share the count.

    Args:
        limit: the largest number of repetitions of one read; 0 for none.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._counted = torch.zeros(1, dtype=torch.int64)
        # A run without repetitions needs no file of shared memory, for which there may be no room.
        if limit:
            self._counted.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def count(self) -> int:
        """The number of repetitions so far, of this process and its workers."""
        return int(self._counted)

    def pause(self, error: BaseException, number: int, what: str) -> None:
        """Logs a failed read and waits before it is repeated.

        Args:
            error: the error of the read.
            number: the number of repetitions of this read so far.
            what: what was read.
        """
        self._counted += 1
        seconds = min(FIRST_PAUSE_SECONDS * 2**number, LONGEST_PAUSE_SECONDS)
        _log.warning(
            "reading %s failed (%s: %.120s); it is repeated in %g s, %d of %d",
            what,
            type(error).__name__,
            error,
            seconds,
            number + 1,
            self.limit,
        )
        time.sleep(seconds)

    def read(self, act: Callable[[], T], what: str) -> T:
        """Returns what a read gives, and repeats it after passing errors, with the same random numbers.

        Args:
            act: the read.
            what: what is read, for the log.

        Raises:
            Exception: the error of the last repetition.
        """
        states = _states()
        for number in range(self.limit):
            try:
                return act()
            except Exception as error:
                if not is_passing(error):
                    raise
                self.pause(error, number, what)
            _restore(states)
        return act()


class RetriedDataset(Dataset[Any]):
    """A map-style data set that repeats failed reads of another one, whose attributes can be read from it.

    Args:
        dataset: the inner data set.
        retries: how often a read may be repeated.
    """

    def __init__(self, dataset: Any, retries: Retries) -> None:
        self.dataset = dataset
        self._retries = retries

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        return self._retries.read(lambda: self.dataset[row], f"row {row}")

    def __getitems__(self, rows: Any) -> Any:
        several = getattr(self.dataset, "__getitems__", None)
        if several is None:
            return [self[row] for row in rows]
        return self._retries.read(lambda: several(rows), f"rows {rows[0]} to {rows[-1]}")

    def __getattr__(self, name: str) -> Any:
        # As `SeededDataset` does: pickling looks up special methods before there are attributes.
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def retried_rows(dataset: Any, retries: Retries) -> Iterator[Any]:
    """Yields the rows of an iterable data set; a failed read is repeated if the data set can say its position.

    The position is what `state_dict` returns and `load_state_dict` takes, as those of `datasets.IterableDataset`. The
    data set itself keeps none: the next iteration begins with its first row.

    Args:
        dataset: the data set.
        retries: how often a read may be repeated.
    """
    reason = _why_not(dataset)
    rows = iter(dataset)
    source, place = dataset, None
    failed, done = 0, 0
    while True:
        if not failed:
            states = _states()
            # Copied before the read, as one that fails may have moved the position. Before the first row it would be
            # that of an earlier iteration.
            place = copy.deepcopy(source.state_dict()) if done and not reason else None
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            if not is_passing(error) or failed == retries.limit:
                raise
            if reason:
                error.add_note(f"data_retries: the read after row {done} is not repeated: {reason}")
                raise
            retries.pause(error, failed, f"the row after {done} rows of a stream")
            failed += 1
            _restore(states)
            source = _with_own_place(dataset)
            if place is not None:
                source.load_state_dict(place)
            rows = iter(source)
            continue
        failed, done = 0, done + 1
        yield row


def _with_own_place(dataset: Any) -> Any:
    """Returns a data set with the same attributes, which can be given a position.

    A data set of `datasets` begins each further iteration at the position that it was given last.
    """
    # Not `copy.copy`: in `datasets`, both would have the same `__dict__`.
    apart = object.__new__(type(dataset))
    vars(apart).update(vars(dataset))
    return apart


def _why_not(dataset: Any) -> str | None:
    """Returns why a stream cannot go on after a failed read; None if it can."""
    if not all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")):
        return f"{type(dataset).__name__} cannot say its position (state_dict, load_state_dict)"
    # The position of a buffer of `datasets` leaves out the rows in it, which would be lost.
    examples = parts_of(getattr(dataset, "_ex_iterable", None))
    if any("Shuffled" in type(part).__name__ for part in examples):
        return "the rows in its shuffle buffer would be lost"
    return None
