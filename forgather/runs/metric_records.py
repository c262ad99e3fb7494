"""The lines of a `metrics.jsonl`: which of them are records, and what a record says.

The input is a line or a record; the output is plain values. Everything that reads metrics asks here, so that a list, a
comparison and a watched run agree about what is damaged and what is a number.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
NOT_METRICS = frozenset({"step", "time", "epoch", "name", "event"})
"""The entries of a record that are not values of a metric."""
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""The texts of numbers that JSON cannot represent."""
MAX_STEP = 2**53
"""The first whole number that a browser cannot represent exactly."""
_LONGEST_TEXT = 300


def record_of(line: bytes) -> Record | None:
    """Returns the record of a line; None if the line is damaged, or empty.

    A step is a whole number from 0 on; one that was written with a point becomes an integer.
    """
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    if isinstance(step, float) and step.is_integer():
        record["step"] = step = int(step)
    is_step = type(step) is int and 0 <= step < MAX_STEP
    return record if is_step or step is None else None


def number_of(value: object) -> float | None:
    """Returns an entry of a record as a number, which may be NaN or infinite; None if it is no number."""
    if type(value) is float:
        return value
    if isinstance(value, str):
        return NOT_FINITE.get(value)
    if type(value) is not int:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def numbers_of(record: Record) -> dict[str, float]:
    """Returns the values of the metrics of a record; none for an event."""
    if "event" in record:
        return {}
    found = ((name, number_of(value)) for name, value in record.items() if name not in NOT_METRICS)
    return {name: number for name, number in found if number is not None}


@dataclass(frozen=True)
class Event:
    """Something that happened at a step: an action of control, or an anomaly.

    Args:
        step: the step, or None if the line has none.
        kind: what happened.
        text: what else the line says.
    """

    step: int | None
    kind: str
    text: str

    @classmethod
    def of(cls, record: Record) -> Event:
        """Returns the event that a line with `event` is about."""
        kind, text = record.get("kind") or record["event"], record.get("message")
        if not isinstance(text, str):
            others = {name: value for name, value in record.items() if name not in ("event", "kind", "step", "time")}
            text = ", ".join(f"{name} {value}" for name, value in others.items())
        return cls(record.get("step"), str(kind)[:_LONGEST_TEXT], text[:_LONGEST_TEXT])
