"""Traces of other numbers of rows, computed from the traces of two; and peaks of other lengths, from those of three.

A step runs the same operators with every number of rows, so that each allocation and each operator of one trace has a
counterpart in the other, and its size is affine in the number of rows. In the length of rows, sizes are at most
quadratic. Peaks are computed from the sizes of the allocations, at each of the traced depths, before a deep model is
drawn: at another size the peak may be elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forgather.ml.planner.allocations import HOST, Allocation, Region
from forgather.ml.planner.deep_trace import DepthTraces
from forgather.ml.planner.extrapolation import extrapolated
from forgather.ml.planner.peaks import Peak
from forgather.ml.planner.saving_rows import saving_rows
from forgather.ml.planner.trace_result import RankTrace
from forgather.planner.work import Message, Operation, work_on_line

_MOST_OF_64_BITS = 2**62
"""Sums of larger terms are computed with the whole numbers of Python."""


def peak_at(points: Mapping[int, DepthTraces], size: int) -> int:
    """Returns the peak of a number of rows, or of a length of rows, in bytes, with what no operator allocates.

    It is that of the plan: the peak of the step, of an evaluation, of answers or of a save.

    Args:
        points: the traces of some sizes. With one, `size` is that one; two give sizes that are affine, and three those
            that are quadratic.
        size: the number of rows, or the length.
    """
    facts, found = next(iter(points.values())).deep_facts, _peaks_at(points, size)
    saved = sum(row.num_bytes for row in saving_rows(found, facts))
    on_device = max(peak.num_bytes for at, peak in found.items() if at.phase != HOST)
    return max(saved, on_device + sum(facts.untraced.values()))


def runs_one_program(points: Mapping[int, DepthTraces]) -> bool:
    """Returns whether the same operators ran with all traced numbers of rows, so that other numbers follow from them.

    Args:
        points: the traces of some numbers of rows.
    """
    first, *others = points.values()
    return all(
        first.shallow.runs_program_of(one.shallow)
        and (first.deeper is None or one.deeper is None or first.deeper.runs_program_of(one.deeper))
        for one in others
    )


def trace_at(points: Mapping[int, DepthTraces], rows: int, micro_batches: int) -> RankTrace:
    """Returns the trace of a number of rows and of micro-batches.

    Args:
        points: the traces of one or two numbers of rows, with two micro-batches each. With one, `rows` is that number.
        rows: the number of rows of a micro-batch.
        micro_batches: the number of micro-batches of an optimizer step, at least 2.
    """
    (low, below), (high, above) = min(points.items()), max(points.items())
    one, other = below.deep, above.deep

    def work(kind: str) -> dict[Any, int]:
        values = getattr(one, kind), getattr(other, kind)
        return work_on_line(*values, between=(low, high), at=rows) if low < high else dict(values[0])

    sizes = [trace.facts.convolution_bytes for trace in (one, other)]
    rise = (sizes[1] - sizes[0]) * (rows - low) // max(1, high - low)
    repeated = {key: count * (micro_batches - 2) for key, count in work("repeated").items()}
    return RankTrace(
        num_blocks=one.num_blocks,
        peaks=_peaks_at(points, rows),
        allocations=(),
        facts=replace(one.facts, convolution_bytes=sizes[0] + rise),
        operations=_sum(work("operations"), {key: n for key, n in repeated.items() if isinstance(key, Operation)}),
        messages=_sum(work("messages"), {key: n for key, n in repeated.items() if isinstance(key, Message)}),
    )


def _sum(one: Mapping[Any, int], other: Mapping[Any, int]) -> dict[Any, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


def _peaks_at(points: Mapping[int, DepthTraces], rows: int) -> Mapping[Region, Peak]:
    first = next(iter(points.values()))
    shallow = _peaks({number: one.shallow for number, one in points.items()}, rows)
    if first.deeper is None or first.shallow.whole is None:
        return shallow
    deeper = _peaks({number: one.deeper for number, one in points.items() if one.deeper is not None}, rows)
    return extrapolated(shallow, deeper, first.shallow.whole)


def _peaks(points: Mapping[int, RankTrace], size: int) -> Mapping[Region, Peak]:
    if len(points) == 1:
        return next(iter(points.values())).peaks
    weights, divisor = _weights(sorted(points), size)
    first, *others = traces = [points[one] for one in sorted(points)]

    def line(values: Sequence[Any]) -> Any:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) // divisor

    common = [at for at in first.peaks if all(at in one.peaks for one in others)]
    between = {at: _on_line([one.peaks[at] for one in traces], line) for at in common}
    if not all(first.runs_program_of(one) for one in others):
        # Other operators ran: the peaks of the regions are the best that is known, and the trace of the answer decides.
        return between

    def sized(place: int) -> Allocation:
        alike = [one.in_order[place] for one in traces]
        return replace(
            alike[0], num_bytes=line([one.num_bytes for one in alike]), shape=_shape([one.shape for one in alike], line)
        )

    sizes = _exact([one.timeline.sizes for one in traces], weights)
    return {**between, **first.timeline.peaks(line(sizes), sized)}


def _exact(sizes: Sequence[np.ndarray], weights: Sequence[int]) -> Sequence[np.ndarray]:
    """Returns the sizes as whole numbers of a type in which weighted sums of all of them are exact."""
    largest = sum(abs(weight) * int(one.max(initial=0)) for weight, one in zip(weights, sizes, strict=True))
    return sizes if largest * len(sizes[0]) < _MOST_OF_64_BITS else [one.astype(object) for one in sizes]


def _shape(shapes: Sequence[tuple[int, ...]], line: Callable[[Sequence[Any]], Any]) -> tuple[int, ...]:
    if len({len(shape) for shape in shapes}) > 1:
        # Those of before the step have an order of their own.
        return shapes[0]
    return tuple(line(sizes) for sizes in zip(*shapes, strict=True))


def _weights(sizes: Sequence[int], size: int) -> tuple[list[int], int]:
    """Returns the weights, and their common divisor, of the values at some sizes in the value at another one.

    Source:
        Lagrange's form of the polynomial through all values, in whole numbers.
    """
    others = [[other for other in sizes if other != one] for one in sizes]
    divisors = [math.prod(one - other for other in rest) for one, rest in zip(sizes, others, strict=True)]
    divisor = math.lcm(*divisors)
    return [
        math.prod(size - other for other in rest) * (divisor // own) for own, rest in zip(divisors, others, strict=True)
    ], divisor


def _on_line(found: Sequence[Peak], line: Callable[[Sequence[Any]], Any]) -> Peak:
    names = {name: None for one in found for name in one.categories}
    return Peak(
        line([one.num_bytes for one in found]),
        {name: line([one.categories.get(name, 0) for one in found]) for name in names},
        made_by=found[0].made_by,
    )
