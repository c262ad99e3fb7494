"""Traces of other numbers of rows, computed from the traces of two.

A step runs the same operators with every number of rows, so that each allocation and each operator of one trace has a
counterpart in the other, and its size is affine in the number of rows. Peaks are computed from the sizes of the
allocations, at each of the traced depths, before a deep model is drawn: at another size the peak may be elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from forgather.ml.planner.allocations import Allocation, Peak, Region, peaks
from forgather.ml.planner.deep_trace import DepthTraces
from forgather.ml.planner.extrapolation import extrapolated
from forgather.ml.planner.rank_recorder import TEMPORARIES
from forgather.ml.planner.rank_trace import RankTrace
from forgather.planner.work import Message, Operation, work_on_line


def peak_at(points: Mapping[int, DepthTraces], rows: int) -> int:
    """Returns the peak of a number of rows in bytes, with what no operator allocates.

    Args:
        points: the traces of one or two numbers of rows. With one, `rows` is that number.
        rows: the number of rows.
    """
    untraced = next(iter(points.values())).deep_facts.untraced
    return max(peak.num_bytes for peak in _peaks_at(points, rows).values()) + sum(untraced.values())


def runs_one_program(points: Mapping[int, DepthTraces]) -> bool:
    """Returns whether the same operators ran with all traced numbers of rows, so that other numbers follow from them.

    Args:
        points: the traces of some numbers of rows.
    """
    first, *others = points.values()
    return all(
        _is_one_program(first.shallow, one.shallow)
        and (first.deeper is None or one.deeper is None or _is_one_program(first.deeper, one.deeper))
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

    repeated = {key: count * (micro_batches - 2) for key, count in work("repeated").items()}
    return RankTrace(
        num_blocks=one.num_blocks,
        peaks=_peaks_at(points, rows),
        allocations=(),
        facts=one.facts,
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
    (low, below), (high, above) = sorted(points.items())

    def line(one: int, other: int) -> int:
        return one + (other - one) * (size - low) // (high - low)

    between = {at: _on_line(below.peaks[at], above.peaks[at], line) for at in below.peaks if at in above.peaks}
    if _is_one_program(below, above):
        sized = [
            replace(one, num_bytes=line(one.num_bytes, other.num_bytes))
            for one, other in zip(_in_order(below), _in_order(above), strict=True)
        ]
        return {**between, **peaks(sized, lambda item: item.category or TEMPORARIES)}
    # Other operators ran: the peaks of the regions are the best that is known, and the trace of the answer decides.
    return between


def _on_line(low: Peak, high: Peak, line: Callable[[int, int], int]) -> Peak:
    names = {**low.categories, **high.categories}
    return Peak(
        line(low.num_bytes, high.num_bytes),
        {name: line(low.categories.get(name, 0), high.categories.get(name, 0)) for name in names},
        made_by=low.made_by,
    )


def _is_one_program(one: RankTrace, other: RankTrace) -> bool:
    return [_program(item) for item in _in_order(one)] == [_program(item) for item in _in_order(other)]


def _in_order(trace: RankTrace) -> list[Allocation]:
    """Returns the allocations of a trace in the order of their birth; what existed before by its death and its use."""
    return sorted(
        trace.allocations, key=lambda item: (item.born, item.died or math.inf, item.category or "", item.num_bytes)
    )


def _program(item: Allocation) -> tuple[Any, ...]:
    return item.born, item.died, item.region, item.operation, item.category
