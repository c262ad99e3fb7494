"""The curves of a run, read from its `metrics.jsonl`.

The input is the file; the output is a `Curves` with a `Curve` for each metric. If a file has grown, only its new bytes
are read. Invariants: a file that is read in parts gives the points of a file that is read at once; a step that was
logged twice counts once, with the later value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, BinaryIO

from forgather.bounded import open_regular
from forgather.runs.curve import MAX_BUCKETS, Curve
from forgather.runs.metric_lines import Event, Lines

TIME, TOKENS = "time", "<tokens>"
"""The names of the curves that say when a step was logged (seconds since 1970), and after how many input tokens. A
metric with the second name is ignored."""
_TOKEN_COUNTS = ("num_input_tokens_seen", "num_tokens")
_RATE = "<tokens of a step>"
"""The name of the column of tokens for each step."""
_NO_METRICS = frozenset({"step", "epoch", "name", TOKENS, _RATE})
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
Column = tuple[list[int], list[float]]
"""The steps of values, and the values."""


@dataclass
class Curves:
    """The curves of a run, and how far its file was read.

    Args:
        buckets: the greatest number of buckets of a curve; None to keep every point.
        curves: the curves by metric.
        lines: what was read of the file.
        events: the first events of the run.
        num_events: the number of events.
        tokens: the last step with a speed, and the number of tokens up to it.
        is_ordered: whether no metric was logged for an earlier step after a later one.
    """

    buckets: int | None = MAX_BUCKETS
    curves: dict[str, Curve] = field(default_factory=dict)
    lines: Lines = field(default_factory=Lines)
    events: list[Event] = field(default_factory=list)
    num_events: int = 0
    tokens: tuple[int, float] = (0, 0.0)
    is_ordered: bool = True

    @property
    def num_tokens(self) -> Curve | None:
        """The number of input tokens by step: as logged, or as it follows from the speeds; None if it is unknown."""
        return next((self.curves[name] for name in (*_TOKEN_COUNTS, TOKENS) if name in self.curves), None)

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, in the order in which they were first logged."""
        return [name for name in self.curves if name not in (TIME, TOKENS)]

    def read(self, file: str) -> None:
        """Reads the lines that were appended to the file since the last call, or all if the file was written again.

        Raises:
            OSError: if the file cannot be read.
        """
        with open_regular(file) as stream:
            if not self.lines.continues(stream) or not self.is_ordered:
                self._restart()
            for records in self.lines.read(stream):
                self._add(records)
                if not self.is_ordered:
                    # A step was logged again after later steps, so which value counts is known at the end alone.
                    self._restart()
                    self._add_sorted(stream)
                    break

    def _restart(self) -> None:
        fresh = Curves(self.buckets)
        self.curves, self.lines, self.events, self.num_events = fresh.curves, fresh.lines, fresh.events, 0
        self.tokens, self.is_ordered = fresh.tokens, True

    def _add_sorted(self, stream: BinaryIO) -> None:
        columns: dict[str, dict[int, float]] = {}
        for records in self.lines.read(stream):
            self._note_events(records)
            for name, (steps, values) in _columns(records).items():
                columns.setdefault(name, {}).update(zip(steps, values, strict=True))
        for name, found in columns.items():
            self._extend(name, *_sorted(found))
        self.is_ordered = False

    def _add(self, records: list[dict[str, Any]]) -> None:
        self._note_events(records)
        checked: list[int] = []
        for name, (steps, values) in _columns(records).items():
            curve = self.curves.get(name)
            begin = self.tokens[0] if name == _RATE else curve.last_step if curve else -1
            # The metrics of lines of one kind have one list of steps, which is checked once.
            if steps is not checked and not all(map(int.__lt__, steps, steps[1:])):
                if any(map(int.__gt__, steps, steps[1:])):
                    self.is_ordered = False
                    return
                steps, values = _sorted(dict(zip(steps, values, strict=True)))
            else:
                checked = steps
            if steps[0] < begin:
                self.is_ordered = False
                return
            self._extend(name, steps, values)

    def _extend(self, name: str, steps: list[int], values: list[float]) -> None:
        if name == _RATE:
            # The speeds of a line are about the steps since the line before it.
            name, values = TOKENS, self._accumulated(steps, values)
        curve = self.curves.setdefault(name, Curve())
        if all(map(math.isfinite, values)):
            curve.extend(steps, values, self.buckets)
            return
        for step, value in zip(steps, values, strict=True):
            if math.isfinite(value):
                curve.extend([step], [value], self.buckets)
            else:
                curve.add_gap(step, value)

    def _accumulated(self, steps: list[int], rates: list[float]) -> list[float]:
        found = []
        before, total = self.tokens
        for step, rate in zip(steps, rates, strict=True):
            total += rate * (step - before) if math.isfinite(rate) else 0.0
            before = step
            found.append(total)
        self.tokens = before, total
        return found

    def _note_events(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            if "event" in record:
                self.num_events += 1
                self.events += [Event.of(record)] if len(self.events) < Event.MOST else []


def _columns(records: Iterable[dict[str, Any]]) -> dict[str, Column]:
    """Returns the numbers of each metric with their steps, in the order of the lines."""
    found: dict[str, Column] = {}
    parts: dict[str, int] = {}
    # Lines of one kind follow each other; a column of many lines is cheaper than many values.
    for names, group in groupby(records, key=tuple):
        rows = list(group)
        if "event" in names or "step" not in names or None in (steps := [row["step"] for row in rows]):
            continue
        columns = {name: _numbers(steps, [row[name] for row in rows]) for name in names if name not in _NO_METRICS}
        if "tokens_per_second" in names and "steps_per_second" in names:
            columns[_RATE] = _rates(rows)
        for name, column in columns.items():
            if not column[0]:
                continue
            parts[name] = parts.get(name, 0) + 1
            if parts[name] == 1:
                found[name] = column
                continue
            if parts[name] == 2:
                # The steps belong to other metrics, too.
                found[name] = list(found[name][0]), list(found[name][1])
            found[name][0].extend(column[0])
            found[name][1].extend(column[1])
    return found


def _sorted(values: dict[int, float]) -> Column:
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def _numbers(steps: list[int], values: list[Any]) -> Column:
    if set(map(type, values)) == {float}:
        return steps, values
    found: Column = [], []
    for step, value in zip(steps, values, strict=True):
        number = _NOT_FINITE.get(value) if isinstance(value, str) else value
        if isinstance(number, int | float) and not isinstance(number, bool):
            found[0].append(step)
            found[1].append(_as_float(number))
    return found


def _as_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _rates(rows: list[dict[str, Any]]) -> Column:
    found: Column = [], []
    for row in rows:
        tokens, steps = row["tokens_per_second"], row["steps_per_second"]
        if type(tokens) in (int, float) and type(steps) in (int, float) and steps > 0:
            found[0].append(row["step"])
            found[1].append(_as_float(tokens) / _as_float(steps))
    return found
