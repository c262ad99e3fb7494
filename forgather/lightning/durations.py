"""Durations in Lightning's forms, as seconds."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any


def seconds_of(duration: Any) -> float | None:
    """Returns a duration in seconds; None if it is not one of Lightning's forms.

    Args:
        duration: "DD:HH:MM:SS", a timedelta, or a mapping of a timedelta's arguments.

    Units:
        seconds.

    Example:
        >>> seconds_of("00:12:00:00"), seconds_of({"hours": 1})
        (43200.0, 3600.0)
    """
    if isinstance(duration, str):
        match = re.fullmatch(r"([0-9]+):([0-9]{2}):([0-9]{2}):([0-9]{2})", duration.strip())
        if match is None:
            return None
        names = ("days", "hours", "minutes", "seconds")
        # More digits than Python converts are more days than a timedelta has.
        if len(match[1]) > 9:
            return None
        duration = {name: int(part) for name, part in zip(names, match.groups(), strict=True)}
    if isinstance(duration, Mapping):
        try:
            duration = datetime.timedelta(**duration)
        except (TypeError, ValueError, OverflowError):
            return None
    return duration.total_seconds() if isinstance(duration, datetime.timedelta) else None
