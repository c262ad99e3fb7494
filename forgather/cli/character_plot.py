"""Curves in characters: each character of a plot is a grid of dots, or one dot where Braille cannot be shown.

The input is curves as points; the output is one `rich` text for each line, with an axis of values at the left and the
steps below. The second and further curves have other colors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")
_LOG_RATIO = 30.0
"""The ratio of the greatest to the least value above which the axis is logarithmic."""
# The bits of the dots of a Braille character by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MIN_WIDTH = 8


@dataclass(frozen=True)
class PlottedCurve:
    """A curve.

    Args:
        name: its name in the legend.
        points: pairs of step and finite value, in the order of the steps.
    """

    name: str
    points: Sequence[tuple[int, float]]


def plot_lines(
    curves: Sequence[PlottedCurve], *, width: int, height: int, label: Callable[[float], str], is_braille: bool = True
) -> list[Text]:
    """Returns a plot of curves as `height` lines and a line with the steps; no lines without points.

    Args:
        curves: the curves, which share their axes. Later curves are drawn over earlier ones.
        width: the number of columns.
        height: the number of lines of the plot itself.
        label: a function that returns the text of a value.
        is_braille: whether Braille characters can be shown; else each dot is an asterisk.
    """
    values = [value for curve in curves for _, value in curve.points]
    steps = [step for curve in curves for step, _ in curve.points]
    if not values or height < 2:
        return []
    scale = _Scale.of(values)
    labels = [label(scale.value_at(1 - row / (height - 1))) for row in range(height)]
    margin = max(map(len, labels))
    columns = width - margin - 2
    if columns < _MIN_WIDTH:
        return []
    grid = _Grid(columns, height, is_braille=is_braille)
    first, last = min(steps), max(steps)
    for number, curve in enumerate(curves):
        grid.draw([((step - first) / max(1, last - first), scale.share(value)) for step, value in curve.points], number)
    every = max(1, (height - 1) // 3)
    lines = []
    for row in range(height):
        # A label at each line would hide how few of them matter.
        text = labels[row] if row % every == 0 or row == height - 1 else ""
        lines.append(Text.assemble((f"{text:>{margin}} ", "dim"), ("┤" if is_braille else "|", "dim"), grid.line(row)))
    note = "  log" if scale.is_log else ""
    ends = f"{first:,}", f"{last:,}{note}"
    gap = columns - len(ends[0]) - len(ends[1])
    axis = ends[0] + " " * gap + ends[1] if gap > 0 else ends[1]
    return [*lines, Text(" " * (margin + 2) + axis, "dim")]


@dataclass(frozen=True)
class _Scale:
    """The axis of the values."""

    low: float
    high: float
    is_log: bool

    @staticmethod
    def of(values: Sequence[float]) -> _Scale:
        low, high = min(values), max(values)
        is_log = low > 0 and high / low > _LOG_RATIO
        return _Scale(math.log(low), math.log(high), True) if is_log else _Scale(low, high, False)

    def share(self, value: float) -> float:
        """Returns the height of a value between 0 and 1."""
        position = math.log(value) if self.is_log else value
        # Halves, because the difference of two large numbers may be infinite.
        return (position / 2 - self.low / 2) / (self.high / 2 - self.low / 2) if self.high > self.low else 0.5

    def value_at(self, share: float) -> float:
        """Returns the value at a height between 0 and 1."""
        position = self.low * (1 - share) + self.high * share
        return math.exp(position) if self.is_log else position


class _Grid:
    """The characters of a plot."""

    def __init__(self, columns: int, lines: int, *, is_braille: bool) -> None:
        self._across, self._down = (2, 4) if is_braille else (1, 1)
        self._is_braille = is_braille
        self._width, self._height = columns * self._across, lines * self._down
        self._bits = [[0] * columns for _ in range(lines)]
        self._owners = [[0] * columns for _ in range(lines)]

    def draw(self, points: Sequence[tuple[float, float]], owner: int) -> None:
        """Draws lines between neighboring points, whose positions are shares of the width and the height."""
        before: tuple[int, int] | None = None
        for across, up in points:
            at = round(across * (self._width - 1)), round((1 - up) * (self._height - 1))
            x, y = at if before is None else before
            steps = max(abs(at[0] - x), abs(at[1] - y), 1)
            for step in range(steps + 1):
                self._set(x + round((at[0] - x) * step / steps), y + round((at[1] - y) * step / steps), owner)
            before = at

    def _set(self, x: int, y: int, owner: int) -> None:
        row, column = y // self._down, x // self._across
        self._bits[row][column] |= _DOTS[y % self._down][x % self._across] if self._is_braille else 1
        self._owners[row][column] = owner

    def line(self, row: int) -> Text:
        """Returns one line of the plot."""
        text = Text()
        for bits, owner in zip(self._bits[row], self._owners[row], strict=True):
            character = " " if not bits else chr(0x2800 + bits) if self._is_braille else "*"
            text.append(character, STYLES[owner % len(STYLES)] if bits else "")
        return text
