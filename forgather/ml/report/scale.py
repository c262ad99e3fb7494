"""Axes: from values to places on the page, with round numbers at the ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forgather.ml.figures import figure, size

_LOG_RATIO = 30.0  # a wider spread of positive values gets a logarithmic axis


@dataclass(frozen=True)
class Scale:
    """One axis.

    Args:
        low: value at the axis's begin.
        high: value at its end; greater than `low`.
        begin: place of `low`.
        end: place of `high`.
        log: logarithmic.
        unit: ticks are round in this unit.
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool = False
    unit: float = 1.0

    def place(self, value: float) -> float:
        """Returns where `value` lies."""
        low, high, here = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.begin + (here - low) / (high - low) * (self.end - self.begin)

    def ticks(self, wanted: int) -> list[float]:
        """Returns about `wanted` round values within the axis."""
        if self.log:
            return _log_ticks(self.low, self.high, wanted)
        step = _round_step((self.high - self.low) / max(wanted, 1) / self.unit) * self.unit
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def axis(
    values: Sequence[float],
    begin: float,
    end: float,
    *,
    may_log: bool = False,
    from_zero: bool = False,
    in_bytes: bool = False,
) -> Scale:
    """Returns an axis that holds `values` with a little room."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if may_log and low > 0 and high / low > _LOG_RATIO:
        return Scale(low / 1.1, high * 1.1, begin, end, log=True)
    if from_zero and low >= 0:
        low = 0.0
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    unit = next((2.0**bits for bits in (30, 20, 10) if high >= 2**bits), 1.0) if in_bytes else 1.0
    return Scale(low if from_zero and low == 0 else low - room, high + room, begin, end, unit=unit)


def tick_text(name: str, value: float) -> str:
    """Returns the number beside a tick."""
    if counts_bytes(name):
        return size(max(value, 0))
    number, unit = figure(float(f"{value:.6g}")), ""
    if number[-1] in "kMG":
        number, unit = number[:-1], number[-1]
    return (number.rstrip("0").rstrip(".") if "." in number and "e" not in number else number) + unit


def counts_bytes(name: str) -> bool:
    """Returns whether a metric of this name is a number of bytes."""
    return name.endswith("_bytes")


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= step * (1 - 1e-9))


def _log_ticks(low: float, high: float, wanted: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        within = [tick for tick in ticks if low <= tick <= high]
        if len(within) >= min(wanted, 3):
            break
    return within[:: max(math.ceil(len(within) / (wanted * 2)), 1)]
