"""Keys that landed elsewhere than they were meant to, because of their indent.

Takes pairs of a key and the first key of the block mapping under it, and the root keys; gives findings. Keeps true:
a document that indents by one space throughout has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from forgather.config.events import Event
from forgather.config.graph import Call, Entry, Mapped
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


def fallen_out(targets: Iterable[Entry]) -> Iterator[Diagnostic]:
    """Yields a warning for each root key of one file that repeats a setting of the target above it, of another file.

    A block of a child that is written without indent makes targets in place of the settings that it should change.
    """
    holder: Entry | None = None
    for entry in targets:
        if holder and _file(entry) != _file(holder) and entry.key in _settings(holder):
            yield Diagnostic(
                code="FG221",
                message=f"{entry.key!r} stands at column 0: it is a target of its own, and changes nothing in "
                f"{holder.key!r}, which has a setting of that name",
                severity=Severity.WARNING,
                span=entry.span,
                hint=f"indent it as the settings of {holder.key!r} are",
            )
        else:
            holder = entry


def _file(entry: Entry) -> str | None:
    return entry.span.file if entry.span else None


def _settings(entry: Entry) -> set[object]:
    node = entry.value
    entries = node.kwargs if isinstance(node, Call) else node.entries if isinstance(node, Mapped) else ()
    return {item.key for item in entries}
