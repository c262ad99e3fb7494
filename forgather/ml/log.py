"""Rank-aware logging.

`get_logger` gives a logger whose lines appear once, on rank 0, unless `all_ranks=True` is passed. Handlers, levels and
formats are not configured here: they belong to the program, not to a library.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from forgather.ml.distributed.env import process_facts


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that writes on rank 0 only, or on all ranks with the rank as a prefix."""

    def log(  # type: ignore[override]
        self, level: int, msg: object, *args: Any, all_ranks: bool = False, **kwargs: Any
    ) -> None:
        """Logs `msg` on rank 0, or on every rank with its number as a prefix.

        Args:
            level: as in `logging`.
            msg: format string.
            *args: its values.
            all_ranks: log on every rank.
            **kwargs: as in `logging`.
        """
        if not self.isEnabledFor(level):
            return
        facts = process_facts()
        if facts.rank != 0 and not all_ranks:
            return
        if all_ranks and facts.world_size > 1:
            msg = f"[rank {facts.rank}] {msg}"
        self.logger.log(level, msg, *args, **{"stacklevel": 2, **kwargs})  # the caller's line, not this one

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Returns message and keyword arguments unchanged."""
        return msg, kwargs


def get_logger(name: str) -> RankLogger:
    """Returns the logger of module `name`."""
    return RankLogger(logging.getLogger(name), {})
