"""The last and the best values in `metrics.jsonl`, without reading each line.

The input is a file that a run may be appending to; the output is the last value of each metric, and the best value of
one metric with its step. An incomplete last line and lines that are no records are left out.
"""

from __future__ import annotations

import json
import math
import os
import re
from typing import NamedTuple

from forgather.runs.metric_records import numbers_of, record_of

_NUM_LINES = 4
_NUMBER = rb'\s*("-?inf"|"nan"|-?[0-9][0-9.eE+-]*)'


class Best(NamedTuple):
    """The best value of a metric.

    Args:
        metric: the name of the metric.
        value: the best value.
        step: the step of its line, or None if it is unknown.
    """

    metric: str
    value: float
    step: int | None


class LastValues(NamedTuple):
    """What the end of a metrics file says.

    Args:
        metrics: the last value of each metric; NaN and infinite values are included.
        step: the last step, or None if there is none.
        damaged: the number of the first of these lines that is no record, from 1 in the content; None if there is none.
    """

    metrics: dict[str, float]
    step: int | None
    damaged: int | None


def read_content(file: str, most: int | None = None) -> bytes:
    """Returns the content of a regular file, or its last `most` bytes, without waiting for a pipe.

    Raises:
        OSError: if the file cannot be read.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        size = os.fstat(descriptor).st_size
        begin = 0 if most is None else max(0, size - most)
        return os.pread(descriptor, size - begin, begin)
    finally:
        os.close(descriptor)


def last_values(content: bytes) -> LastValues:
    """Returns the last values of the metrics in the content of a metrics file.

    Only the last lines and the last line of an evaluation are parsed, so a metric that was logged long before them is
    missing.

    Args:
        content: the content, or its end.
    """
    # The last line may still be being written.
    end = content.rfind(b"\n")
    starts = _last_lines(content, end)
    evaluated = content.rfind(b'"eval_', 0, end)
    if evaluated >= 0:
        starts.add(content.rfind(b"\n", 0, evaluated) + 1)
    metrics: dict[str, float] = {}
    step: int | None = None
    damaged: int | None = None
    for start in sorted(starts):
        line = content[start : content.find(b"\n", start)]
        record = record_of(line)
        if record is not None:
            step = step if record.get("step") is None else record["step"]
            metrics |= numbers_of(record)
        elif damaged is None and line.strip():
            damaged = content.count(b"\n", 0, start) + 1
    return LastValues(metrics, step, damaged)


def _last_lines(content: bytes, end: int) -> set[int]:
    """Returns the positions at which the last complete lines begin."""
    starts: set[int] = set()
    while end > 0 and len(starts) < _NUM_LINES:
        start = content.rfind(b"\n", 0, end) + 1
        # The beginning of the content may be the middle of a line.
        if start or content[:1] == b"{":
            starts.add(start)
        end = start - 1
    return starts


def best_value(content: bytes, metric: str, *, is_greater_better: bool) -> Best | None:
    """Returns the best finite value of a metric, the first one of equal values; None if there is none.

    Args:
        content: the content of a metrics file.
        metric: the name of the metric.
        is_greater_better: whether greater values are better.
    """
    # The last line may still be being written.
    content = content[: content.rfind(b"\n") + 1]
    # A search for the name alone is many times faster than parsing each line.
    matches = re.compile(re.escape(json.dumps(metric).encode()) + rb":" + _NUMBER).finditer(content)
    better = max if is_greater_better else min
    values = [(value, match.start()) for match in matches if math.isfinite(value := _number(match[1]))]
    while values:
        best = better(value for value, _ in values)
        at = next(position for value, position in values if value == best)
        line = content[content.rfind(b"\n", 0, at) + 1 : content.find(b"\n", at)]
        record = record_of(line)
        if record is not None and numbers_of(record).get(metric) == best:
            return Best(metric, best, record.get("step"))
        # The line of an event, or a damaged one: not a value of this metric.
        values.remove((best, at))
    return None


def _number(text: bytes) -> float:
    try:
        return float(text.strip(b'"'))
    except ValueError:
        return math.nan
