"""Traces of other numbers of rows, computed from the traces of two.

A step runs the same operators with every number of rows, so that each allocation and each operator of one trace has a
counterpart in the other, and its size is affine in the number of rows. Peaks are computed from the sizes of the
allocations, at each of the traced depths, before a deep model is drawn: at another size the peak may be elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
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

    FSDP2 and ZeRO free gathered weights at other moments if a micro-batch is very small.

    Args:
        points: the traces of some numbers of rows.
    """
    found = [[one.shallow, one.deeper] for one in points.values()]
    programs = [[None if one is None else [_program(item) for item in one.allocations] for one in two] for two in found]
    return all(program == programs[0] for program in programs)


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

    if [_program(item) for item in below.allocations] == [_program(item) for item in above.allocations]:
        sized = [
            replace(one, num_bytes=line(one.num_bytes, other.num_bytes))
            for one, other in zip(below.allocations, above.allocations, strict=True)
        ]
        return peaks(sized, lambda item: item.category or TEMPORARIES)
    # Other operators ran: the peaks of the regions are the best that is known, and the trace of the answer decides.
    return {
        region: Peak(
            line(peak.num_bytes, above.peaks[region].num_bytes),
            {
                name: line(peak.categories.get(name, 0), above.peaks[region].categories.get(name, 0))
                for name in {**peak.categories, **above.peaks[region].categories}
            },
        )
        for region, peak in below.peaks.items()
        if region in above.peaks
    }


def _program(item: Allocation) -> tuple[Any, ...]:
    return item.born, item.died, item.region, item.operation
