"""Rank-aware logging.

Takes the name of a module, gives its logger. Keeps true: a line logged through `get_logger` appears
once however many processes run, unless it says `all_ranks=True`; nothing here configures handlers,
levels or formats, which belong to the program and not to a library.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from forgather.ml.distributed.env import process_facts


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that speaks on rank 0 only, and names the rank where several ranks speak."""

    def log(  # type: ignore[override]
        self, level: int, msg: object, *args: Any, all_ranks: bool = False, **kwargs: Any
    ) -> None:
        """Logs `msg` on rank 0, or on every rank with its number in front."""
        if not self.isEnabledFor(level):
            return
        facts = process_facts()
        if facts.rank != 0 and not all_ranks:
            return
        if all_ranks and facts.world_size > 1:
            msg = f"[rank {facts.rank}] {msg}"
        self.logger.log(level, msg, *args, **{"stacklevel": 2, **kwargs})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Returns message and keywords as they are."""
        return msg, kwargs


def get_logger(name: str) -> RankLogger:
    """Returns the logger of module `name`."""
    return RankLogger(logging.getLogger(name), {})
