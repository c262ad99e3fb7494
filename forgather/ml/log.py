"""Rank-aware logging.

`get_logger` returns a logger that writes each message once, on rank 0. With `all_ranks=True`, every rank writes the
message. This module configures no handlers, levels or formats: the program that uses Forgather configures them.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from forgather.ml.distributed.env import process_facts

_logged_once: set[str] = set()


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that writes on rank 0 only, or on all ranks with the rank as a prefix."""

    def log(  # type: ignore[override]
        self, level: int, msg: object, *args: Any, all_ranks: bool = False, **kwargs: Any
    ) -> None:
        """Logs `msg` on rank 0, or on every rank with the rank as a prefix.

        Args:
            level: the log level, as in `logging`.
            msg: the format string.
            *args: the values for the format string.
            all_ranks: True to log on every rank.
            **kwargs: further keyword arguments of `logging.Logger.log`.
        """
        if not self.isEnabledFor(level):
            return
        facts = process_facts()
        if facts.rank != 0 and not all_ranks:
            return
        if all_ranks and facts.world_size > 1:
            msg = f"[rank {facts.rank}] {msg}"
        self.logger.log(level, msg, *args, **{"stacklevel": 2, **kwargs})  # the caller's line, not this one

    def warning_once(self, msg: str, *args: Any) -> None:
        """Logs a warning, unless this Python process has logged the same: a plan builds the objects of a config often.

        Args:
            msg: the format string.
            *args: the values for the format string.
        """
        text = msg % args if args else msg
        if text not in _logged_once:
            _logged_once.add(text)
            self.warning("%s", text)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Returns the message and the keyword arguments unchanged."""
        return msg, kwargs


def get_logger(name: str) -> RankLogger:
    """Returns the rank-aware logger for a module.

    Args:
        name: the name of the module.
    """
    return RankLogger(logging.getLogger(name), {})
