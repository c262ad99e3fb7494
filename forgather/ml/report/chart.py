"""The charts of the report page: SVG curves, and axes with round numbers at the ticks.

The input is series of numbers by step; the output is HTML in which all texts are escaped. An attribute of the SVG
element contains the points as JSON, from which the script of the page shows the values under the mouse pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from forgather.ml.number_format import format_bytes, format_count, format_number
from forgather.ml.report.html_text import html_text
from forgather.ml.report.run_data import Series
from forgather.redaction import hide

_LOG_RATIO = 30.0  # a wider spread of positive values gets a logarithmic axis


@dataclass(frozen=True)
class Scale:
    """The scale of one axis of a chart, which maps values to coordinates.

    Args:
        low: the value at the start of the axis.
        high: the value at the end of the axis, which is greater than `low`.
        begin: the coordinate of `low`.
        end: the coordinate of `high`.
        log: True for a logarithmic axis.
        unit: the unit in which the values at the ticks are round numbers, for example 1024 for KiB.

    Units:
        Coordinates are pixels of the SVG's view box.
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool = False
    unit: float = 1.0

    def place(self, value: float) -> float:
        """Returns the coordinate of `value` on the axis, in pixels of the SVG's view box."""
        low, high, here = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.begin + (here - low) / (high - low) * (self.end - self.begin)

    def ticks(self, wanted: int) -> list[float]:
        """Returns about `wanted` round values in the range of the axis, at which ticks are drawn."""
        if self.log:
            return _log_ticks(self.low, self.high, wanted)
        step = _round_step((self.high - self.low) / max(wanted, 1) / self.unit) * self.unit
        # The tolerance keeps a tick at the very end of the axis, which rounding could put just outside.
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
    """Returns a scale whose range contains all `values`, with a margin at the ends.

    Args:
        values: the values. If there are none, the range from 0 to 1 is used.
        begin: the coordinate of the start of the axis.
        end: the coordinate of the end of the axis.
        may_log: True to use a logarithmic axis for positive values that differ by more than a factor of 30.
        from_zero: True to start the axis at zero, unless there are negative values.
        in_bytes: True to draw ticks at round numbers of KiB, MiB or GiB.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if may_log and low > 0 and high / low > _LOG_RATIO:
        return Scale(low / 1.1, high * 1.1, begin, end, log=True)
    if from_zero and low >= 0:
        low = 0.0
    # Equal values would give an axis of no length, by which `place` would divide.
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    unit = next((2.0**bits for bits in (30, 20, 10) if high >= 2**bits), 1.0) if in_bytes else 1.0
    return Scale(low if from_zero and low == 0 else low - room, high + room, begin, end, unit=unit)


def tick_text(name: str, value: float) -> str:
    """Returns the text at a tick.

    Args:
        name: the name of the metric. A value of a metric whose name ends in "_bytes" is shown in bytes.
        value: the value at the tick.
    """
    if counts_bytes(name):
        return format_bytes(max(value, 0))
    number, unit = format_number(float(f"{value:.6g}")), ""
    if number[-1] in "kMG":
        number, unit = number[:-1], number[-1]
    return (number.rstrip("0").rstrip(".") if "." in number and "e" not in number else number) + unit


def counts_bytes(name: str) -> bool:
    """Returns True if the name of a metric says that its values are numbers of bytes."""
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


# Close to the size of a chart on the page in pixels, because its texts are scaled with it.
WIDTH, HEIGHT = 380, 190
WIDE_WIDTH, WIDE_HEIGHT = 740, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 34
_MOST_POINTS = 800
_SMOOTHED_FROM = 60  # points; a shorter curve is readable without smoothing


@dataclass(frozen=True)
class Look:
    """The options of a chart.

    Args:
        may_log: True to use a logarithmic axis for positive values that differ by more than a factor of 30.
        from_zero: True to start the value axis at zero, unless there are negative values.
        smooth: True to draw a long curve faintly, with a smoothed curve on top.
        wide: True for a chart that is twice as wide as the others.
    """

    may_log: bool = True
    from_zero: bool = False
    smooth: bool = True
    wide: bool = False


def chart(
    title: str,
    lines: Sequence[tuple[str, Series]],
    look: Look | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Returns the HTML of a chart with a title, a legend and curves, or "" if no series has a value.

    Args:
        title: the title of the chart.
        lines: the label and the series of each curve, in the order of the colors.
        look: the options of the chart, or None for the default options.
        marks: the step and the text of each thing that happened at a step, which is marked on the chart.
    """
    look = look or Look()
    lines = [(label, thinned(series)) for label, series in lines if series.values]
    if not lines:
        return ""
    # The last step of a run that ended by an anomaly has no value.
    steps = [*(step for _, series in lines for step in series.steps), *(step for step, _ in marks)]
    values = [value for _, series in lines for value in series.values]
    name = lines[0][1].name
    width, height = (WIDE_WIDTH, WIDE_HEIGHT) if look.wide else (WIDTH, HEIGHT)
    across = _steps_axis(steps, width)
    in_bytes = counts_bytes(name)
    upward = axis(values, height - _BOTTOM, _TOP, may_log=look.may_log, from_zero=look.from_zero, in_bytes=in_bytes)
    curves = "".join(_curve(number, series, across, upward, look.smooth) for number, (_, series) in enumerate(lines))
    wide = " wide" if look.wide else ""
    scale = "log scale" if upward.log else ""
    lost = sum(series.num_not_finite for _, series in lines)
    note = f'<p class="note bad">{lost} values were not finite</p>' if lost else ""
    return (
        f'<figure class="card chart{wide}"><figcaption><h3>{html_text(title)}</h3><span class="hint">{scale}</span>'
        f"{_legend([label for label, _ in lines])}</figcaption>"
        f'<div class="plot"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{html_text(title)} by step" '
        f'data-points="{escape(_points(lines, across, upward))}">'
        f"{_grid(name, across, upward)}{curves}{_marks(marks, across, height)}"
        f'<line class="cross" y1="{_TOP}" y2="{height - _BOTTOM}"/></svg><div class="tip"></div></div>{note}</figure>'
    )


def thinned(series: Series, most: int = _MOST_POINTS) -> Series:
    """Returns a series that is reduced to about `most` points without losing a peak.

    The points are divided into groups of neighbors. The lowest and the highest point of each group are kept, and the
    first and the last point of the series.

    Args:
        series: the series to reduce.
        most: the approximate maximum number of points.
    """
    number = len(series.values)
    if number <= most:
        return series
    stretch = -(-number // (most // 2))
    kept = {0, number - 1}
    for begin in range(0, number, stretch):
        places = range(begin, min(begin + stretch, number))
        kept |= {min(places, key=series.values.__getitem__), max(places, key=series.values.__getitem__)}
    chosen = sorted(kept)
    return Series(
        name=series.name,
        steps=[series.steps[place] for place in chosen],
        values=[series.values[place] for place in chosen],
        num_not_finite=series.num_not_finite,
    )


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Returns smoothed values: the mean of two exponential moving averages, one in each direction.

    A forward average alone would lag behind the values.

    Args:
        values: the values to smooth.
        window: the approximate number of values on each side that contribute to a smoothed value.
    """
    forward, backward = _trailing(values, window), _trailing(values[::-1], window)[::-1]
    return [(one + other) / 2 for one, other in zip(forward, backward, strict=True)]


def _trailing(values: Sequence[float], window: int) -> list[float]:
    decay, total, weight, means = 1 - 1 / window, 0.0, 0.0, []
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        # Divided by the sum of the weights, because the first means have few values and would start near zero.
        means.append(total / weight)
    return means


def _steps_axis(steps: Sequence[float], width: int) -> Scale:
    low, high = min(steps), max(steps)
    return Scale(low if low < high else low - 1, high if low < high else high + 1, _LEFT, width - _RIGHT)


def _curve(number: int, series: Series, across: Scale, upward: Scale, smooth: bool) -> str:
    color = f"c{number % 4}"
    # A path of one point would be invisible.
    if len(series.values) == 1:
        x, y = across.place(series.steps[0]), upward.place(series.values[0])
        return f'<circle class="{color} dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    raw = _path(series.steps, series.values, across, upward)
    if len(series.values) < _SMOOTHED_FROM or not smooth:
        dots = len(series.values) <= 30
        marks = "".join(
            f'<circle class="{color} dot" cx="{across.place(step):.1f}" cy="{upward.place(value):.1f}" r="2.6"/>'
            for step, value in zip(series.steps, series.values, strict=True)
            if dots
        )
        return f'<path class="{color}" d="{raw}"/>{marks}'
    mean = _path(series.steps, smoothed(series.values, max(len(series.values) // 25, 4)), across, upward)
    return f'<path class="{color} faint" d="{raw}"/><path class="{color}" d="{mean}"/>'


def _path(steps: Sequence[float], values: Sequence[float], across: Scale, upward: Scale) -> str:
    places = (f"{across.place(s):.1f},{upward.place(v):.1f}" for s, v in zip(steps, values, strict=True))
    return "M" + "L".join(places)


def _grid(name: str, across: Scale, upward: Scale) -> str:
    parts = []
    for value in upward.ticks(5):
        y = upward.place(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{across.end:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 8}" y="{y + 4:.1f}">{escape(tick_text(name, value))}</text>')
    bottom = round(upward.begin)
    parts.append(f'<line class="base" x1="{_LEFT}" x2="{across.end:.0f}" y1="{bottom}" y2="{bottom}"/>')
    for step in across.ticks(round(across.end / 100)):
        # There is no step between two steps, so a short run gets no ticks at fractions.
        if step == int(step):
            x, text = across.place(step), str(int(step)) if step < 100_000 else format_count(step)
            parts.append(f'<line class="base" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 18}">{text}</text>')
    return "".join(parts)


def _marks(marks: Sequence[tuple[float, str]], across: Scale, height: int) -> str:
    parts = []
    for step, text in marks:
        x = across.place(step)
        top = f"{x - 4:.1f},{_TOP - 8} {x + 4:.1f},{_TOP - 8} {x:.1f},{_TOP}"
        parts.append(
            f'<g class="mark"><title>{html_text(f"step {step}, {text}")}</title>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/><polygon points="{top}"/></g>'
        )
    return "".join(parts)


def _legend(labels: Sequence[str]) -> str:
    if len(labels) < 2:
        return ""
    keys = "".join(f'<span><i class="k{n % 4}"></i>{html_text(label)}</span>' for n, label in enumerate(labels))
    return f'<div class="legend">{keys}</div>'


def _points(lines: Sequence[tuple[str, Series]], across: Scale, upward: Scale) -> str:
    curves = [
        {
            "label": hide(label),
            "color": number % 4,
            "points": [
                [step, round(across.place(step), 1), round(upward.place(value), 1), tick_text(series.name, value)]
                for step, value in zip(series.steps, series.values, strict=True)
            ],
        }
        for number, (label, series) in enumerate(lines)
    ]
    return json.dumps(curves, separators=(",", ":"))
