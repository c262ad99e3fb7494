"""The largest batch, or the longest rows, whose memory stays below a limit: arithmetic over a few traces.

The input is a function that traces sizes, and one that predicts the peak of any size from traces. Some small sizes are
traced, the answer is computed, and the answer itself is traced. While a step runs the same operators with every size,
the bytes that are alive at one moment are affine in the number of rows and at most quadratic in their length, and the
prediction is exact. If the trace of the answer has another peak than predicted, it becomes one of the points and the
computation is repeated.

Units:
    bytes; sizes are numbers of rows, or lengths in steps of some tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Trace = TypeVar("Trace")
Peaks = Mapping[Any, int]

MOST_TRACES = 8
"""The number of sizes that are traced at most."""

_PREDICTED = 5  # traces after which the interval is halved: a prediction that keeps missing is no help


@dataclass(frozen=True, kw_only=True)
class LargestSize:
    """The answer of `largest_size`.

    Args:
        size: the largest size that fits; 0 if not even the smallest one does.
        num_bytes: the traced peak of this size, or of the smallest size if none fits.
        next_bytes: the peak of the next size: traced, or predicted from exact traces. None if `size` is the largest
            allowed, or if the next size was not reached.
        traced: the sizes that were traced, in order.
        is_exact: whether the next size is known not to fit, or is not allowed; False if the traces were used up before.
    """

    size: int
    num_bytes: int
    next_bytes: int | None
    traced: tuple[int, ...]
    is_exact: bool = True


def largest_size(
    measure: Callable[[Sequence[int]], Sequence[Trace]],
    predict: Callable[[Mapping[int, Trace], int], int],
    limit: int,
    *,
    most: int,
    first: Sequence[int] = (1, 2),
    most_traces: int = MOST_TRACES,
) -> LargestSize:
    """Returns the largest size whose peak is not above a limit.

    Args:
        measure: a function that traces sizes and returns their traces.
        predict: a function of (traces of one size, or of as many as `first`; a size), which returns the peak of the
            size in bytes. For a size that was traced, it returns the peak of the trace.
        limit: the limit in bytes.
        most: the largest size that is allowed, such as the number of rows of the data.
        first: the sizes that are traced first, of which 1 is one. A prediction uses as many traces.
        most_traces: the number of sizes that are traced at most.

    Raises:
        ValueError: if `most` is below 1.
    """
    if most < 1:
        raise ValueError(f"most is {most}; the smallest size is 1")
    allowed = [size for size in first if size <= most]
    traces = dict(zip(allowed, measure(allowed), strict=True))
    peaks = {size: predict({size: trace}, size) for size, trace in traces.items()}
    while True:
        low = max((size for size, peak in peaks.items() if peak <= limit), default=0)
        high = min((size for size, peak in peaks.items() if peak > limit), default=most + 1)
        if low == 0 or low >= high - 1 or len(traces) >= most_traces:
            following = peaks.get(low + 1)
            return _answer(peaks, low, following, is_exact=low == 0 or low >= high - 1)
        # The points on both sides of the answer, then the nearest ones.
        nearest = sorted(traces, key=lambda size: (size not in (low, high), abs(size - low)))[: len(first)]
        points = {size: traces[size] for size in nearest}
        size = (low + high) // 2
        if len(traces) <= _PREDICTED:
            sizes = range(low + 1, high)
            fitting = bisect.bisect_right(sizes, limit, key=lambda size: predict(points, size))
            size = sizes[max(fitting - 1, 0)]
        (traces[size],) = measure((size,))
        peaks[size] = predict({size: traces[size]}, size)
        following = predict(points, size + 1)
        if peaks[size] == predict(points, size) <= limit < following and size < most:
            return _answer(peaks, size, following)


def peaks_of_ranks(plan: Mapping[str, Any]) -> Peaks:
    """Returns the bytes of each phase of each range of ranks of a plan, which is given as data."""
    return {(*rank["ranks"], phase["phase"]): phase["num_bytes"] for rank in plan["ranks"] for phase in rank["phases"]}


def peak_of_worst(points: Mapping[int, Peaks], size: int) -> int:
    """Returns the peak of the worst rank of a pipeline for a size, on the lines through the peaks of one or two sizes.

    Example:
        >>> peak_of_worst({1: {"first": 9, "last": 5}, 2: {"first": 10, "last": 8}}, 4)
        14
    """
    (low, below), (high, above) = min(points.items()), max(points.items())
    if low == high:
        return max(below.values())
    return max(one + (above[key] - one) * (size - low) // (high - low) for key, one in below.items())


def smaller_sizes(size: int, unit: int = 1) -> Iterator[int]:
    """Yields smaller sizes to try after one did not fit, in steps that grow: a tenth, a fifth, two fifths, then halves.

    Args:
        size: the size that did not fit.
        unit: of what the sizes are multiples.

    Example:
        >>> list(smaller_sizes(100)), list(smaller_sizes(16, 4))
        ([90, 72, 43, 21, 10, 5, 2, 1], [12, 8, 4])
    """
    share = 0.1
    while size > unit:
        size = max(unit, min(int(size * (1 - share)) // unit * unit, size - unit))
        yield size
        share = min(0.5, 2 * share)


def _answer(peaks: Mapping[int, int], size: int, following: int | None, *, is_exact: bool = True) -> LargestSize:
    return LargestSize(
        size=size,
        num_bytes=peaks[max(size, 1)],
        next_bytes=following,
        traced=tuple(peaks),
        is_exact=is_exact,
    )
