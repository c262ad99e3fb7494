"""The outputs of a callback (run folder, rank filter, console), and a decorator for callbacks that only report."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from rich import get_console
from rich.console import Console

logger = logging.getLogger(__name__)

Event = TypeVar("Event", bound=Callable[..., Any])


def run_folder(args: Any, run_dir: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of the run: `run_dir`, else the arguments' `logging_dir`, else `<output_dir>/runs`.

    Args:
        args: the training arguments.
        run_dir: the folder that was passed to the callback, or None if there is none.
    """
    # `getattr`, because the arguments of transformers do not have a `logging_dir` in every version.
    chosen = run_dir or getattr(args, "logging_dir", None)
    return Path(chosen) if chosen else Path(args.output_dir) / "runs"


def is_selected_rank(rank_filter: int | Collection[int] | None, args: Any) -> bool:
    """Returns True if a rank filter selects the rank of this process.

    Args:
        rank_filter: a rank, a collection of ranks, or None for all ranks.
        args: the training arguments, whose `process_index` is the rank.
    """
    if rank_filter is None:
        return True
    rank = int(args.process_index)
    return rank == rank_filter if isinstance(rank_filter, int) else rank in rank_filter


def shared_console() -> Console:
    """Returns the shared rich console on standard output.

    Lines that are printed through the shared console appear above live bars.
    """
    # Shared: lines of a second console would be printed into the live bars of the first.
    return get_console()


def report_only(event: Event) -> Event:
    """Decorates an event method of a callback that only reports: an exception is logged once, and the run continues."""

    @functools.wraps(event)
    def guarded(self: Any, *positional: Any, **named: Any) -> Any:
        """Calls the event method; logs the first exception of each event."""
        try:
            return event(self, *positional, **named)
        except Exception as error:  # noqa: BLE001  border: a report must not end a run
            # Once per event and callback, since an event of every step would otherwise fill the log.
            reported = self.__dict__.setdefault("_told_failures", set())
            if event.__name__ not in reported:
                reported.add(event.__name__)
                reason = str(error) or "no reason given"
                logger.warning(
                    "%s.%s failed: %s: %s", type(self).__name__, event.__name__, type(error).__name__, reason
                )
            return None

    return guarded  # type: ignore[return-value]
