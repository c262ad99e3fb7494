"""Progress of data preparation: a bar on a terminal, and one log line at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forgather.ml.log import RankLogger
from forgather.ml.number_format import plural

T = TypeVar("T", bound=Sized)


def show_progress(batches: Iterable[T], *, total: int | None, what: str, logger: RankLogger) -> Iterator[T]:
    """Yields `batches` unchanged and shows a progress bar on standard error, if that is a terminal.

    Args:
        batches: the groups of rows.
        total: the number of rows in all groups together; None if it is not known.
        what: the name of the activity, for example "tokenizing".
        logger: the logger that gets one line at the end.
    """
    begin = time.monotonic()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Transient: the bar disappears at the end, and the log line stays.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        count = 0
        for batch in batches:
            yield batch
            count += len(batch)
            progress.advance(task, len(batch))
    logger.info("%s: %s in %.1f s", what, plural(count, "row"), time.monotonic() - begin)
