"""The values of one metric by step, in buckets of steps.

The input is values in the order of their steps; the output is points. Each bucket keeps its smallest and its largest
value with their steps, so that spikes survive, and the mean of its values. Invariants: the smallest, the largest and
the last value of a curve are exact, however long the run is; values that are appended in parts give the points of
values that are appended at once; a value that is not finite is in no bucket, but its step is known.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

MAX_BUCKETS = 400
"""The number of buckets of a curve; each has at most two points."""
_MOST_GAPS = 50


@dataclass
class Curve:
    """The values of one metric by step.

    Args:
        steps: the steps of the points before the last one, in ascending order.
        values: their values.
        last: the last step with a finite value, and this value; None if there is none.
        sums: for each bucket of reduced points, its first step, the sum of its values and their number.
        width: the number of steps of a bucket.
        num_reduced: the number of points at the beginning that belong to reduced buckets.
        count: the number of steps with a finite value.
        gaps: the first steps with a value that is not finite, each with the value as text.
        num_gaps: the number of steps with a value that is not finite.
        last_gap: the last such step, or -1.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    last: tuple[int, float] | None = None
    sums: list[tuple[int, float, int]] = field(default_factory=list)
    width: int = 1
    num_reduced: int = 0
    count: int = 0
    gaps: list[tuple[int, str]] = field(default_factory=list)
    num_gaps: int = 0
    last_gap: int = -1

    @property
    def last_step(self) -> int:
        """The last step with any value, or -1."""
        return max(self.last_gap, self.last[0] if self.last else -1)

    @property
    def ends_in_gap(self) -> bool:
        """Whether the last value is not finite."""
        return self.last_gap > (self.last[0] if self.last else -1)

    def extend(self, steps: Sequence[int], values: Sequence[float], buckets: int | None) -> None:
        """Appends finite values.

        Args:
            steps: the steps in strictly ascending order; the first one may repeat the last step of the curve.
            values: their values.
            buckets: the greatest number of buckets; None to keep every point.
        """
        self._forget(steps[0])
        # The last point may be logged again, so it is not a part of any bucket yet.
        if self.last is not None:
            self.steps.append(self.last[0])
            self.values.append(self.last[1])
        self.steps += steps[:-1]
        self.values += values[:-1]
        self.last = steps[-1], values[-1]
        self.count += len(steps)
        if buckets is not None and len(self.steps) > 4 * buckets:
            self._reduce(buckets)

    def add_gap(self, step: int, value: float) -> None:
        """Records that the value of a step is not finite; the step may repeat the last step of the curve."""
        self._forget(step)
        self.last_gap = step
        self.num_gaps += 1
        if len(self.gaps) < _MOST_GAPS:
            self.gaps.append((step, str(value)))

    def _forget(self, step: int) -> None:
        """Removes the value of a step that is logged again."""
        if self.last is not None and self.last[0] == step:
            self.count -= 1
            # The points of reduced buckets stay: `last` is never one of them.
            at = len(self.steps) - 1
            self.last = (self.steps.pop(), self.values.pop()) if at >= self.num_reduced else None
        elif self.last_gap == step:
            self.num_gaps -= 1
            if self.gaps and self.gaps[-1][0] == step:
                self.gaps.pop()
            self.last_gap = self.gaps[-1][0] if self.gaps else -1

    def reduced(self, buckets: int | None) -> Curve:
        """Returns a copy with at most two points for each bucket, and the last point.

        Args:
            buckets: the greatest number of buckets; None to keep every point.
        """
        found = Curve(**vars(self))
        found.steps, found.values = list(self.steps), list(self.values)
        if buckets is not None and self.count > 2 * buckets:
            found._reduce(buckets)
        return found

    def points(self) -> tuple[list[int], list[float]]:
        """Returns the steps and the values of all points, in ascending order of the steps."""
        if self.last is None:
            return self.steps, self.values
        return [*self.steps, self.last[0]], [*self.values, self.last[1]]

    def means(self) -> tuple[list[int], list[float]]:
        """Returns the middle steps of the buckets and the means of their values; the points if none was reduced."""
        if self.width == 1:
            return self.points()
        sums = self._sums(*self.points())
        last = self.last[0] if self.last else 0
        return [min(start + self.width // 2, last) for start, _, _ in sums], [total / count for _, total, count in sums]

    def _reduce(self, buckets: int) -> None:
        """Doubles the width of the buckets until there are at most `buckets`, and keeps two points of each."""
        if not self.steps:
            return
        while self.steps[-1] // self.width - self.steps[0] // self.width >= buckets:
            self.width *= 2
        self.sums = self._sums(self.steps, self.values)
        steps: list[int] = []
        values: list[float] = []
        for first, end in _bounds(self.steps, self.width, 0):
            part = self.values[first:end]
            for at in sorted({part.index(min(part)), part.index(max(part))}):
                steps.append(self.steps[first + at])
                values.append(part[at])
        self.steps, self.values, self.num_reduced = steps, values, len(steps)

    def _sums(self, steps: list[int], values: list[float]) -> list[tuple[int, float, int]]:
        """Returns the sums of all buckets, those of points that were reduced included."""
        found: dict[int, tuple[float, int]] = {}
        raw = [(steps[first], *_sum(values[first:end])) for first, end in _bounds(steps, self.width, self.num_reduced)]
        for step, total, count in [*self.sums, *raw]:
            bucket = step // self.width
            found[bucket] = _added(found[bucket], (total, count)) if bucket in found else (total, count)
        return [(bucket * self.width, total, count) for bucket, (total, count) in found.items()]


def mean_of(values: Sequence[float]) -> float:
    """Returns the mean of finite numbers, whose sum may be too large for a float."""
    try:
        return fmean(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def stdev_of(values: Sequence[float]) -> float:
    """Returns the sample standard deviation of at least two finite numbers; infinity if it is too large for a float."""
    try:
        return stdev(values)
    except OverflowError:
        return 8 * stdev([value / 8 for value in values])


def _sum(values: Sequence[float]) -> tuple[float, int]:
    """Returns a sum of numbers and their number; their mean and 1 if the sum is too large for a float."""
    try:
        return math.fsum(values), len(values)
    except OverflowError:
        return mean_of(values), 1


def _added(one: tuple[float, int], other: tuple[float, int]) -> tuple[float, int]:
    total, count = one[0] + other[0], one[1] + other[1]
    return (total, count) if math.isfinite(total) else (one[0] / count + other[0] / count, 1)


def _bounds(steps: Sequence[int], width: int, begin: int) -> Iterator[tuple[int, int]]:
    """Yields, for each bucket from an index on, the index of its first point and that after its last point."""
    while begin < len(steps):
        end = bisect_left(steps, (steps[begin] // width + 1) * width, begin)
        yield begin, end
        begin = end
