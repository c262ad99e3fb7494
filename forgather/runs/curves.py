"""The curves of a run, read from its `metrics.jsonl`.

The input is the file; the output is a `Curves` with a `Curve` for each metric. If a file has grown, only its new bytes
are read. Invariants: a file that is read in parts gives the points of a file that is read at once; a step that was
logged twice counts once, with the later value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from forgather.runs.curve import MAX_BUCKETS, Curve, Steps, Values
from forgather.runs.growing_file import GrowingFile, Position
from forgather.runs.metric_columns import TIME, TOKENS, TOKENS_PER_STEP, Column, columns_of, plain_columns
from forgather.runs.metric_records import Event, Record, number_of

_TOKEN_COUNTS = ("num_input_tokens_seen", "num_tokens")
_PIECE_BYTES = 1 << 16
"""Units: bytes. A line that is not plain costs a slow reading of so many bytes."""
_MOST_EVENTS = 200


@dataclass
class Curves:
    """The curves of a run, and how far its file was read.

    Args:
        buckets: the greatest number of buckets of a curve; None to keep every point.
        curves: the curves by metric.
        position: how far the file was read, and which lines are damaged.
        events: the first events of the run.
        num_events: the number of events.
        pauses: for each pause, the step after which the run was paused, and the seconds.
        tokens: the last two steps with a speed, each with the number of tokens up to it.
        is_ordered: whether no metric was logged for an earlier step after a later one.
    """

    buckets: int | None = MAX_BUCKETS
    curves: dict[str, Curve] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    events: list[Event] = field(default_factory=list)
    num_events: int = 0
    pauses: list[tuple[int, float]] = field(default_factory=list)
    tokens: list[tuple[int, float]] = field(default_factory=list)
    is_ordered: bool = True

    @property
    def num_tokens(self) -> Curve | None:
        """The number of input tokens by step: as logged, or as it follows from the speeds; None if it is unknown."""
        return next((self.curves[name] for name in (*_TOKEN_COUNTS, TOKENS) if name in self.curves), None)

    def seconds(self, buckets: int | None) -> Column | None:
        """Returns the seconds since the first line of the file, without pauses, by step; None if no line has a time.

        Args:
            buckets: the greatest number of buckets, each with two points; None for every point.
        """
        times = self.curves.get(TIME)
        if times is None:
            return None
        steps, values = times.reduced(buckets).points()
        if not len(steps):
            return None
        since = values - values[0]
        for step, paused in self.pauses:
            since[steps > step] -= paused
        return Column(steps, since)

    @property
    def paused_seconds(self) -> float:
        """The seconds of all pauses."""
        return sum(seconds for _, seconds in self.pauses)

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, in the order in which they were first logged."""
        return [name for name in self.curves if name not in (TIME, TOKENS)]

    def read(self, file: str) -> None:
        """Reads the lines that were appended to the file since the last call, or all if the file was written again.

        Raises:
            OSError: if the file cannot be read.
        """
        lines = GrowingFile(file, self._restart, self.position)
        has_new = False
        for block in lines.blocks():
            has_new = True
            for columns in self._columns(lines, block):
                if self.is_ordered:
                    self._add(columns)
        if has_new and not self.is_ordered:
            # A step was logged again after later steps, so which value counts is known at the end alone.
            lines.begin_again()
            parts = [columns for block in lines.blocks() for columns in self._columns(lines, block)]
            for name in dict.fromkeys(name for columns in parts for name in columns):
                found = [columns[name] for columns in parts if name in columns]
                self._extend(name, *_sorted(*map(np.concatenate, zip(*found, strict=True))))
            self.is_ordered = False
        self.position = lines.position

    def _restart(self) -> None:
        vars(self).update(vars(Curves(self.buckets)))

    def _columns(self, lines: GrowingFile, block: bytes) -> Iterator[dict[str, Column]]:
        """Yields the columns of a block of lines."""
        first = lines.position.num_lines + 1
        # A short block is read faster without the library that reads a long one.
        whole = plain_columns(block) if len(block) > _PIECE_BYTES else None
        for piece in _pieces(block) if whole is None else ():
            found = plain_columns(piece) if len(piece) < len(block) else None
            if found is None:
                records = list(lines.records_of(piece, first))
                self._note_events(records)
                found = columns_of(records)
            yield found
            first += piece.count(b"\n")
        if whole is not None:
            yield whole

    def _add(self, columns: dict[str, Column]) -> None:
        checked: Steps | None = None
        for name, (steps, values) in columns.items():
            curve = self.curves.get(TOKENS if name == TOKENS_PER_STEP else name)
            begin = curve.last_step if curve else -1
            # The metrics of lines of one kind have one list of steps, which is checked once.
            if steps is not checked and not (np.diff(steps) > 0).all():
                if (np.diff(steps) < 0).any():
                    self.is_ordered = False
                    return
                steps, values = _sorted(steps, values)
            else:
                checked = steps
            if steps[0] < begin:
                self.is_ordered = False
                return
            self._extend(name, steps, values)

    def _extend(self, name: str, steps: Steps, values: Values) -> None:
        if name == TOKENS_PER_STEP:
            # The speeds of a line are about the steps since the line before it.
            name, values = TOKENS, self._accumulated(steps, values)
        self.curves.setdefault(name, Curve()).extend(steps, values, self.buckets)

    def _accumulated(self, steps: Steps, values: Values) -> Values:
        # The last step may be logged again, with another speed.
        before = ([(0, 0.0)] + [one for one in self.tokens if one[0] < steps[0]])[-1]
        tokens = np.diff(steps, prepend=before[0]) * np.where(np.isfinite(values), values, 0.0)
        found: Values = np.cumsum(np.append(before[1], tokens))[1:]
        self.tokens = [before, *zip(steps.tolist(), found.tolist(), strict=True)][-2:]
        return found

    def _note_events(self, records: list[Record]) -> None:
        for record in records:
            if "event" in record:
                self.num_events += 1
                self.events += [Event.of(record)] if len(self.events) < _MOST_EVENTS else []
                paused, step = number_of(record.get("paused_seconds")), record.get("step")
                if record.get("action") == "resume" and paused is not None and step is not None:
                    self.pauses.append((step, paused))


def _pieces(block: bytes) -> Iterator[bytes]:
    """Yields whole lines of about the size of a piece."""
    begin = 0
    while begin < len(block):
        end = block.find(b"\n", begin + _PIECE_BYTES) + 1 or len(block)
        yield block[begin:end]
        begin = end


def _sorted(steps: Steps, values: Values) -> Column:
    """Returns values in the order of their steps, of each step the last one."""
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    is_last = np.append(np.diff(steps) > 0, True)
    return Column(steps[is_last], values[is_last])
