"""A curve that grows for days in constant memory: neighboring points share a bucket, which keeps their extremes.

The input is points in the order of their logging; the output is buckets. When there are too many, two neighbors become
one, so each bucket covers twice as many steps. An extreme is never lost. A reader that polls is given only the buckets
that have changed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

NUM_BUCKETS = 512
"""The number of buckets above which neighbors are merged, after which half as many remain."""


@dataclass(slots=True)
class Bucket:
    """Neighboring points.

    Args:
        first_step: the step of the first point.
        last_step: the step of the last point.
        lowest: the least finite value, or infinity if there is none.
        highest: the greatest finite value, or minus infinity if there is none.
        lowest_step: the step of the least value.
        highest_step: the step of the greatest value.
        last: the value of the last point, which may be NaN or infinite.
        version: the version of the curve at which the bucket changed last.
    """

    first_step: int
    last_step: int
    lowest: float
    highest: float
    lowest_step: int
    highest_step: int
    last: float
    version: int

    def add(self, other: Bucket) -> None:
        """Adds the points of the bucket that follows."""
        self.last_step, self.last = other.last_step, other.last
        if other.lowest < self.lowest:
            self.lowest, self.lowest_step = other.lowest, other.lowest_step
        if other.highest > self.highest:
            self.highest, self.highest_step = other.highest, other.highest_step
        self.version = max(self.version, other.version)


class GrowingCurve:
    """The values of one metric by step.

    Attributes:
        buckets: the buckets, in the order of their steps.
        version: the version of the last change, as it was given by the caller.
    """

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.version = 0
        self._width = 1

    def add(self, step: int, value: float, version: int) -> None:
        """Adds a point. A step that is not after the last one repeats a part of the run, which no longer counts.

        Args:
            step: the step.
            value: the value, which may be NaN or infinite.
            version: a number that is not less than that of the last point.
        """
        self.version = version
        if self.buckets and step <= self.buckets[-1].last_step:
            # A bucket with later points goes as a whole: extremes that no longer count must not stay in it.
            del self.buckets[bisect_left(self.buckets, step, key=lambda bucket: bucket.last_step) :]
        lowest, highest = (value, value) if math.isfinite(value) else (math.inf, -math.inf)
        point = Bucket(step, step, lowest, highest, step, step, value, version)
        if self.buckets and step // self._width == self.buckets[-1].first_step // self._width:
            self.buckets[-1].add(point)
            return
        self.buckets.append(point)
        if len(self.buckets) > NUM_BUCKETS:
            self._merge()

    def _merge(self) -> None:
        while len(self.buckets) > NUM_BUCKETS // 2:
            self._width *= 2
            merged: list[Bucket] = []
            for bucket in self.buckets:
                if merged and bucket.first_step // self._width == merged[-1].first_step // self._width:
                    merged[-1].add(bucket)
                else:
                    merged.append(bucket)
            self.buckets = merged
        for bucket in self.buckets:
            bucket.version = self.version

    def changes_since(self, version: int) -> tuple[int, list[Bucket]]:
        """Returns how many of the first buckets are the same as at a version, and all buckets after them.

        Args:
            version: the version at which the reader last asked; 0 before the first time.
        """
        kept = len(self.buckets)
        while kept and self.buckets[kept - 1].version > version:
            kept -= 1
        return kept, self.buckets[kept:]

    def best(self, *, is_greater_better: bool) -> tuple[float, int] | None:
        """Returns the best finite value and its step, the first one of equal values; None if there is none."""
        found = [(-one.highest, one.highest_step) if is_greater_better else (one.lowest, one.lowest_step)
                 for one in self.buckets]  # fmt: skip
        value, step = min(found, default=(math.inf, 0))
        if math.isinf(value):
            return None
        return (-value if is_greater_better else value), step

    @property
    def last(self) -> float:
        """The last value."""
        return self.buckets[-1].last

    @property
    def last_step(self) -> int:
        """The step of the last value."""
        return self.buckets[-1].last_step
