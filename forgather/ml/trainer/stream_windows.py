"""The windows of virtual streams, on which all processes agree: whether there is one, and whether reading it failed.

Takes the windows of this process; gives those in which some process has a row. How many rows a stream has is not known
before they are read, so the processes exchange a number for each window. It also says that a process could not read
its rows: then every process raises, and none waits for that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Protocol

from forgather.ml.distributed import collectives
from forgather.ml.trainer.bad_rows import BadRows
from forgather.ml.types import Window

_FAILED, _HAS_ROWS, _GOES_ON, _ENDED = 3.0, 2.0, 1.0, 0.0


class StreamPosition(Protocol):
    """What `agreed_windows` needs of the training data."""

    @property
    def drops_last(self) -> bool:
        """Whether an epoch ends before the first window that is not full."""

    @property
    def bad_rows(self) -> BadRows:
        """The object that counts rows that are left out."""

    def advance(self, window: Window) -> None:
        """Moves the position past the rows of a window."""


def agreed_windows(own: Iterator[Window], data: StreamPosition, sum_of_rows: Callable[[int], int]) -> Iterator[Window]:
    """Yields the windows of this process until the last process has no further row.

    A window without a row on any rank is passed over. Such windows are at the end of an epoch, where streams have
    ended. None is read ahead. Collective: every process must iterate over its windows.

    Args:
        own: the windows of this process, which go on with padding after its last row.
        data: the training data, whose position moves past windows that are not yielded.
        sum_of_rows: the function that adds a number of rows over all data-parallel ranks.

    Raises:
        TrainingError: FG958, on every process, if more rows were left out than may be.
        ForgatherError: on every process, if reading the rows of one fails, see `collectives.run_collectively`.
    """
    while True:
        window, failure = _next_of(own)
        # A process that failed takes part once more: the others would wait for it until the group times out.
        is_full = window is not None and window.is_full
        # All of them must have full windows: the least one decides.
        is_short = data.drops_last and collectives.all_max(0.0 if is_full else 1.0)
        if failure is not None:
            found = _FAILED
        elif window is None or is_short or (window.is_last and not window.num_rows):
            found = _ENDED
        else:
            found = _HAS_ROWS if window.num_rows else _GOES_ON
        found = collectives.all_max(found)
        if found == _FAILED:
            collectives.run_collectively(functools.partial(_raise, failure))
        if data.bad_rows.limit is not None:
            data.bad_rows.refuse_more(sum_of_rows(data.bad_rows.count))
        if found == _ENDED or window is None:
            return
        if found == _HAS_ROWS:
            yield window
        else:
            data.advance(window)


def _next_of(own: Iterator[Window]) -> tuple[Window | None, Exception | None]:
    """Returns the next window, or the exception that reading it raised."""
    try:
        return next(own, None), None
    except Exception as error:  # noqa: BLE001 - the border between processes: raised after they have agreed
        return None, error


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
