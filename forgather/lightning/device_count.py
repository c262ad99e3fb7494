"""The number of processes that Lightning's word `devices` means.

The input is the value of the word; the output is a number, "auto", or None for devices that are chosen one by one.
"""

from __future__ import annotations

import re
from typing import Any

from forgather.value_text import is_one_of

LARGEST = 2**63 - 1
"""The largest number of steps, epochs, batches or processes."""


def is_whole(value: Any, lowest: int) -> bool:
    """Returns whether a value is a whole number from `lowest` to `LARGEST`; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= LARGEST


def device_count(value: Any) -> int | str | None:
    """Returns the number of devices that the word `devices` means, "auto" if all, None if particular ones are chosen.

    Args:
        value: the value of the word.

    Example:
        >>> device_count("0,1"), device_count(-1), device_count([3])
        (2, 'auto', None)
    """
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,9}\s*(,\s*-?[0-9]{1,9}\s*)*,?\s*", value):
        numbers = [int(part) for part in value.split(",") if part.strip()]
        value = numbers if "," in value else numbers[0]
    if is_one_of(value, ("auto", -1, [-1])):
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(type(one) is int for one in value):
        # The first ones are those that as many processes use anyway.
        return len(value) if sorted(value) == list(range(len(value))) and value else None
    return None
