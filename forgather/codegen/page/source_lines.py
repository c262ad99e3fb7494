"""The lines of the rendered text in which the values of a graph are written, and the lines that have no effect.

The input is a `RenderedText` and boxes; the output is line numbers. A line is overridden only if no value of the graph
is written in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from forgather.codegen.diagram import Box, Row, is_plain, label
from forgather.config.graph import Entry
from forgather.config.rendered import RenderedText
from forgather.source import Origin


class RenderedLines:
    """Finds the rendered lines that an origin (a line of a template) produced.

    Args:
        rendered: the rendered text with its source map.
    """

    def __init__(self, rendered: RenderedText) -> None:
        self.texts = rendered.text.split("\n")
        self._of_origin: dict[int, list[int]] = {}
        self._of_equal: dict[Origin, list[int]] = {}
        self._origins = rendered.source_map.origins
        ends = [0]
        for text in self.texts:
            ends.append(ends[-1] + len(text) + 1)
        starts, text = rendered.source_map.starts, rendered.text
        for start, end, origin in zip(starts, [*starts[1:], len(text)], rendered.source_map.origins, strict=True):
            # The text of an origin may begin with the end of the line before it.
            blanks = len(text[start:end]) - len(text[start:end].lstrip())
            if start + blanks < end:
                self._of_origin.setdefault(id(origin), []).append(bisect_right(ends, start + blanks))

    def find(self, origin: Origin | None, word: str = "", below: int = 0) -> int | None:
        """Returns the number of the rendered line that an origin produced; None if it produced none.

        If the origin produced several lines, the arguments `word` and `below` select one of them.

        Args:
            origin: the origin: an object of the source map, or an object that is equal to one of them.
            word: the text that the line should contain; the first such line is returned.
            below: the number of the first line that is preferred.
        """
        lines = self._of_origin.get(id(origin)) or self._equal_to(origin)
        if len(lines) < 2:
            return lines[0] if lines else None
        later = [line for line in lines if line >= below] or list(lines)
        return next((line for line in later if word in self.texts[line - 1]), later[0])

    def _equal_to(self, origin: Origin | None) -> list[int]:
        """Returns the lines of an origin that is equal, but not identical, to an origin of the source map.

        The tag that an expression writes has such an origin.
        """
        if origin is None:
            return []
        if not self._of_equal:
            for one in self._origins:
                self._of_equal.setdefault(one, []).extend(self._of_origin.get(id(one), ()))
        return sorted(set(self._of_equal.get(origin, ())))

    def block(self, line: int) -> range:
        """Returns the lines of the value whose key is on `line`: this line, and the more indented lines below it."""
        indent = _indent(self.texts[line - 1])
        last = line
        for number in range(line + 1, len(self.texts) + 1):
            text = self.texts[number - 1]
            if text.strip():
                if _indent(text) <= indent:
                    break
                last = number
        return range(line, last + 1)


def rendered_lines(boxes: Sequence[Box], lines: RenderedLines) -> dict[int, int]:
    """Returns the rendered line of each row and of each box, by the `id` of the row or box.

    Args:
        boxes: the boxes of the graph.
        lines: the finder of rendered lines.
    """
    found: dict[int, int] = {}

    def note(row: Row, below: int) -> int:
        origin = row.entry.origin if row.entry is not None else row.node.origin
        line = lines.find(origin, f"{label(row.step)}:" if row.entry is not None else "", below)
        if line is not None:
            found[id(row)] = line
        below = line or below
        for inner in row.rows:
            note(inner, below)
        return below

    # Rows are in the order of the text: if an origin (a line in a loop) wrote several lines, a row belongs to the first
    # one that is not above the row before it.
    for box in boxes:
        below = found.get(id(box), 0)
        for row in box.rows:
            below = note(row, below)
            child = None if row.box is None else boxes[row.box]
            # A shared node is written at its first path; the other places have an alias.
            if child is not None and child.node is not None and child.path == (*box.path, row.step):
                line = lines.find(child.node.origin, "", below)
                if line is not None:
                    found[id(child)] = line
    return found


def overridden_lines(boxes: Iterable[Box], lines: RenderedLines, found: dict[int, int]) -> dict[int, int]:
    """Returns the lines that have no effect, each with the line that overrides it.

    Args:
        boxes: the boxes of the graph.
        lines: the finder of rendered lines.
        found: the line of each row and box, as `rendered_lines` returns it.
    """
    boxes = list(boxes)
    rows = [row for box in boxes for outer in box.rows for row in (outer, *outer.rows)]
    alive = sorted({*found.values(), *(lines.find(row.node.origin) or 0 for row in rows if not is_plain(row.node))})
    over: dict[int, int] = {}
    for row in rows:
        for earlier in row.entry.replaced if row.entry is not None else ():
            line = _line_of(earlier, lines)
            if line is None or id(row) not in found:
                continue
            block = lines.block(line)
            # Only if no value of the graph is written in any line of the block.
            if bisect_left(alive, block.start) == bisect_right(alive, block.stop - 1):
                over.update(dict.fromkeys(block, found[id(row)]))
    return over


def _line_of(entry: Entry, lines: RenderedLines) -> int | None:
    return lines.find(entry.origin, f"{entry.key}:" if not isinstance(entry.key, tuple) else "")


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
