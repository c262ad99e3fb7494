"""The columns of the metrics in many lines at once: for each metric its steps and its values, as arrays.

The input is lines, or their records; the output is columns in the order of the lines. Lines that are plain are read by
pyarrow, which takes a quarter of the time of Python's reader. What is plain is decided here, and so narrowly that the
columns are those of the records: all other lines are left to `metric_records`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forgather.runs.metric_records import MAX_STEP, NOT_METRICS, Record, number_of, numbers_of

TIME, TOKENS, TOKENS_PER_STEP = "time", "<tokens>", "<tokens of a step>"
"""The columns of the times of the lines (seconds since 1970), of the tokens up to a step, and of those of a step, as
they follow from the speeds. Metrics with the last two names are ignored."""
_TOKEN_SPEED, _SPEED = "tokens_per_second", "steps_per_second"
_IGNORED = (NOT_METRICS | {TOKENS, TOKENS_PER_STEP}) - {TIME}


class Column(NamedTuple):
    """The values of a metric.

    Args:
        steps: their steps.
        values: the values, which may be NaN or infinite.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def columns_of(records: Iterable[Record]) -> dict[str, Column]:
    """Returns the columns of records."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        step = record.get("step")
        if step is None or "event" in record:
            continue
        numbers = {name: value for name, value in numbers_of(record).items() if name not in _IGNORED}
        tokens, steps = numbers.get(_TOKEN_SPEED, math.nan), numbers.get(_SPEED, math.nan)
        if math.isfinite(tokens) and 0 < steps < math.inf:
            numbers[TOKENS_PER_STEP] = tokens / steps
        time = number_of(record.get(TIME))
        if time is not None:
            numbers[TIME] = time
        for name, value in numbers.items():
            column = found.setdefault(name, ([], []))
            column[0].append(step)
            column[1].append(value)
    return {name: Column(np.array(steps, np.int64), np.array(values)) for name, (steps, values) in found.items()}


def plain_columns(lines: bytes) -> dict[str, Column] | None:
    """Returns the columns of lines if all of them are plain, else None.

    A plain line is one object that says its step. Its other values are finite numbers, truth values, and texts that are
    no dates; an entry is of one kind in all lines.

    Args:
        lines: whole lines.
    """
    table = _table(lines) if _is_flat(lines) and lines.isascii() else None
    count = lines.count(b"\n")
    if table is None or table.num_rows != count or not {"step", "event"} & {*table.column_names} == {"step"}:
        return None
    steps = table["step"].to_numpy()
    if steps.dtype != np.int64 or steps.min() < 0 or steps.max() >= MAX_STEP:
        return None
    found: dict[str, Column] = {}
    speeds: dict[str, NDArray[np.float64]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = str(column.type)
        if kind in ("int64", "double"):
            # A missing value is NaN here. Infinity is read again: it may be a number that Python's reader refuses.
            values = speeds[name] = column.to_numpy().astype(np.float64)
            if np.isfinite(values).sum() != count - column.null_count:
                return None
            is_known = ~np.isnan(values)
        elif kind == "string":
            numbers = [number_of(text) for text in column.to_pylist()]
            is_known = np.array([number is not None for number in numbers])
            values = np.array(numbers, np.float64)
        elif kind in ("bool", "null"):
            continue
        else:
            return None
        if name not in _IGNORED and is_known.any():
            # The columns that miss no value share their steps.
            found[name] = Column(steps, values) if is_known.all() else Column(steps[is_known], values[is_known])
    if _TOKEN_SPEED in speeds and _SPEED in speeds:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            rates = speeds[_TOKEN_SPEED] / speeds[_SPEED]
        is_known = (speeds[_SPEED] > 0) & ~np.isnan(rates)
        if is_known.any():
            found[TOKENS_PER_STEP] = Column(steps[is_known], rates[is_known])
    return found


def _is_flat(lines: bytes) -> bool:
    """Returns whether each line is one pair of braces around text without braces and brackets.

    Anything else is left to Python's reader: a deep value, or a line that is no object, can end the process in pyarrow.
    """
    letters = np.frombuffer(lines, np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    starts = np.append(0, ends[:-1] + 1)
    has_braces = (letters[starts] == ord("{")).all() and (letters[ends - 1] == ord("}")).all()
    are_outside = len(ends) == lines.count(b"{") == lines.count(b"}")
    return bool(len(ends) and has_braces and are_outside and b"[" not in lines)


def _table(lines: bytes) -> Any:
    """Returns lines as a table of pyarrow; None if they are not all objects with values of one kind for each name."""
    # Late imports: they take longer than reading the metrics of short runs.
    from pyarrow import ArrowException, py_buffer
    from pyarrow.json import ReadOptions, read_json

    try:
        return read_json(py_buffer(lines), ReadOptions(use_threads=False, block_size=len(lines) + 1))
    except ArrowException:
        return None
