"""A key that became the child of its neighbour because two indents differ by a little.

Takes pairs of a key and the first key of the block mapping under it, gives findings. Keeps true: a document
that indents by one blank throughout has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from forgather.config.events import Event
from forgather.config.places import Places
from forgather.errors import Diagnostic, Severity


class Indents:
    """The steps from keys to the keys under them."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()
        self._narrow: list[tuple[Event, Event]] = []

    def note(self, key: Event, child: Event) -> None:
        """Takes a key and the first key of the mapping under it."""
        step = child.column - key.column
        self._steps[step] += 1
        if step == 1 and child.line > key.line:
            self._narrow.append((key, child))

    def findings(self, places: Places) -> Iterator[Diagnostic]:
        """Yields a warning for each step of one blank in a document that usually indents by more."""
        if not self._narrow or self._steps.most_common(1)[0][0] <= 1:
            return
        for key, child in self._narrow:
            where = places.span(key.line, key.column)
            message = (
                f"{child.value!r}, indented by {child.column - 1}, lands inside {key.value!r} ({where}), "
                f"indented by {key.column - 1}"
            )
            hint = "give both the same indent, or indent the inner one by more"
            yield places.finding(child, message, code="FG221", severity=Severity.WARNING, hint=hint)
