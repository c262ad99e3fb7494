"""The values of one metric by step, in buckets of steps.

The input is values in the order of their steps; the output is points. Each bucket keeps its smallest and its largest
value with their steps, so that spikes survive, and the mean of its values. Invariants: the smallest, the largest and
the last value of a curve are exact, however long the run is; values that are appended in parts give the points of
values that are appended at once; a value that is not finite is in no bucket, but its step is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BUCKETS = 400
"""The number of buckets of a curve; each has at most two points."""
_MOST_GAPS = 50
Steps = NDArray[np.int64]
Values = NDArray[np.float64]


def _none(kind: type) -> Any:
    return field(default_factory=lambda: np.empty(0, kind))


@dataclass
class Curve:
    """The values of one metric by step.

    Args:
        steps: the steps of the points before the last one, in ascending order.
        values: their values.
        last: the last step with a finite value, and this value; None if there is none.
        starts: the first steps of the buckets of reduced points.
        sums: the sums of the values of these buckets.
        counts: the numbers of these values.
        width: the number of steps of a bucket.
        num_reduced: the number of points at the beginning that belong to reduced buckets.
        count: the number of steps with a finite value.
        gaps: the first steps with a value that is not finite, each with the value as text.
        num_gaps: the number of steps with a value that is not finite.
        last_gap: the last such step, or -1.
    """

    steps: Steps = _none(np.int64)
    values: Values = _none(np.float64)
    last: tuple[int, float] | None = None
    starts: Steps = _none(np.int64)
    sums: Values = _none(np.float64)
    counts: Steps = _none(np.int64)
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

    def extend(self, steps: Steps, values: Values, buckets: int | None) -> None:
        """Appends values.

        Args:
            steps: the steps in strictly ascending order; the first one may repeat the last step of the curve.
            values: their values.
            buckets: the greatest number of buckets; None to keep every point.
        """
        self._forget(int(steps[0]))
        is_finite = np.isfinite(values)
        if not is_finite.all():
            missing = zip(steps[~is_finite].tolist(), values[~is_finite].tolist(), strict=True)
            self._add_gaps([(step, str(value)) for step, value in missing])
            steps, values = steps[is_finite], values[is_finite]
            if not len(steps):
                return
        # The last point may be logged again, so it is not a part of any bucket yet.
        before = ([], []) if self.last is None else ([self.last[0]], [self.last[1]])
        self.steps = np.concatenate([self.steps, np.array(before[0], np.int64), steps[:-1]])
        self.values = np.concatenate([self.values, np.array(before[1]), values[:-1]])
        self.last = int(steps[-1]), float(values[-1])
        self.count += len(steps)
        if buckets is not None and len(self.steps) > 4 * buckets:
            self._reduce(buckets)

    def _add_gaps(self, gaps: list[tuple[int, str]]) -> None:
        self.last_gap = gaps[-1][0]
        self.num_gaps += len(gaps)
        self.gaps += gaps[: _MOST_GAPS - len(self.gaps)]

    def _forget(self, step: int) -> None:
        """Removes the value of a step that is logged again."""
        if self.last is not None and self.last[0] == step:
            self.count -= 1
            self.last = None
            # The points of reduced buckets stay: `last` is never one of them.
            if len(self.steps) > self.num_reduced:
                self.last = int(self.steps[-1]), float(self.values[-1])
                self.steps, self.values = self.steps[:-1], self.values[:-1]
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
        found = replace(self)
        if buckets is not None and self.count > 2 * buckets:
            found._reduce(buckets)
        return found

    def points(self) -> tuple[Steps, Values]:
        """Returns the steps and the values of all points, in ascending order of the steps."""
        if self.last is None:
            return self.steps, self.values
        return np.append(self.steps, self.last[0]), np.append(self.values, self.last[1])

    def means(self) -> tuple[Steps, Values]:
        """Returns the middle steps of the buckets and the means of their values; the points if none was reduced."""
        if self.width == 1:
            return self.points()
        starts, sums, counts = self._sums(*self.points())
        last = self.last[0] if self.last else 0
        # The sum of the largest numbers is infinite, and their mean is not.
        return np.minimum(starts + self.width // 2, last), np.nan_to_num(sums / counts)

    def _reduce(self, buckets: int) -> None:
        """Doubles the width of the buckets until there are at most `buckets`, and keeps two points of each."""
        if self.num_reduced == len(self.steps) and self._fits(buckets):
            return
        while not self._fits(buckets):
            self.width *= 2
        self.starts, self.sums, self.counts = self._sums(self.steps, self.values)
        begins = _begins(self.steps // self.width)
        is_kept = np.zeros(len(self.steps), np.bool_)
        for extreme in np.minimum, np.maximum:
            is_kept[_first_extremes(extreme, self.values, begins)] = True
        self.steps, self.values = self.steps[is_kept], self.values[is_kept]
        self.num_reduced = len(self.steps)

    def _fits(self, buckets: int) -> bool:
        """Returns whether the points before the last one are within so many buckets."""
        return not len(self.steps) or self.steps[-1] // self.width - self.steps[0] // self.width < buckets

    def _sums(self, steps: Steps, values: Values) -> tuple[Steps, Values, Steps]:
        """Returns the first steps, the sums and the counts of all buckets, with those of reduced points."""
        raw, ones = values[self.num_reduced :], np.ones(len(values) - self.num_reduced, np.int64)
        parts = np.concatenate([self.starts, steps[self.num_reduced :]]) // self.width
        begins = _begins(parts)
        sums, counts = np.concatenate([self.sums, raw]), np.concatenate([self.counts, ones])
        with np.errstate(over="ignore", invalid="ignore"):
            return parts[begins] * self.width, np.add.reduceat(sums, begins), np.add.reduceat(counts, begins)


def _begins(buckets: Steps) -> NDArray[np.intp]:
    """Returns the positions at which another bucket begins."""
    return np.flatnonzero(np.append(True, buckets[1:] != buckets[:-1]))


def _first_extremes(extreme: np.ufunc, values: Values, begins: NDArray[np.intp]) -> NDArray[np.intp]:
    """Returns the position of the first smallest or greatest value of each bucket."""
    sizes = np.diff(begins, append=len(values))
    at = np.flatnonzero(values == np.repeat(extreme.reduceat(values, begins), sizes))
    return at[_begins(np.searchsorted(begins, at, side="right"))]
