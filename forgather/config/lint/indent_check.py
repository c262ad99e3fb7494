"""Keys and list items whose indent puts them into another value than was meant.

The inputs are pairs of a key and the first key of the block mapping under that key, texts that contain dashes, and the
root keys; the output is findings. Invariant: a document that indents by one space throughout has no finding about
indents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from forgather.config.graph import Entry
from forgather.config.traverse import entries
from forgather.config.yaml.events import Event
from forgather.config.yaml.source_positions import SourcePositions
from forgather.errors import Diagnostic, Severity

_FOLDED_LINES = 10


class IndentSteps:
    """The indents of the mappings in one document, and the texts that may contain list items."""

    def __init__(self) -> None:
        self._steps: list[tuple[Event, Event]] = []
        self._texts: list[Event] = []

    def note(self, key: Event, child: Event) -> None:
        """Records a key and the first key of the mapping that is its value."""
        self._steps.append((key, child))

    def note_text(self, text: Event) -> None:
        """Records a plain text that contains a dash and a space."""
        self._texts.append(text)

    def findings(self, places: SourcePositions) -> Iterator[Diagnostic]:
        """Yields a warning for each line that is part of the value above, probably by a mistake in its indent."""
        for text in self._texts:
            yield from _folded(text, places)
        widths = Counter(child.column - key.column for key, child in self._steps)
        # A document that mostly indents by one space has no unusual step to report.
        if not widths or max(widths) <= 1 or 2 * widths[1] > widths.total():
            return
        # The most frequent step, and the larger one of two equally frequent.
        usual = max((count, step) for step, count in widths.items() if step > 1)[1]
        for key, child in self._steps:
            step = child.column - key.column
            if child.line == key.line or step >= usual or step < 1:
                continue
            # One space is never meant in such a document; a larger step only if the key came from `super()`.
            if step == 1 or _is_inherited(key, child, places):
                yield _inside(key, child, places)


def _inside(key: Event, child: Event, places: SourcePositions) -> Diagnostic:
    where = places.span(key.line, key.column)
    message = (
        f"{child.value!r}, indented by {child.column - 1}, becomes a child of {key.value!r} ({where}), "
        f"indented by {key.column - 1}"
    )
    hint = "give both the same indent, or indent the inner one by more"
    # The finding is at the line of the child template, which is the one that the user has just added.
    own = key if places.builds_on(places.at(key.line, key.column), places.at(child.line, child.column)) else child
    if own is key:
        message = (
            f"{key.value!r}, indented by {key.column - 1}, becomes the parent of {child.value!r} "
            f"({places.span(child.line, child.column)}), indented by {child.column - 1}"
        )
        hint = "give both the same indent, or a value to the key"
    return places.finding(own, message, code="FG221", severity=Severity.WARNING, hint=hint)


def _is_inherited(key: Event, child: Event, places: SourcePositions) -> bool:
    """Returns whether a parent template wrote the key, and a child template the key under it in the same block."""
    above, below = places.at(key.line, key.column), places.at(child.line, child.column)
    return bool(above and below and above.site.block == below.site.block and places.builds_on(below, above))


def _folded(text: Event, places: SourcePositions) -> Iterator[Diagnostic]:
    """Yields a warning if a text continues on a line that looks like an item of a sequence."""
    first = places.rendered_line(text.line)
    for number in range(text.line + 1, text.line + _FOLDED_LINES):
        line = places.rendered_line(number)
        item = line.strip()
        if not item:
            continue
        indent = len(line) - len(line.lstrip(" "))
        # YAML folds the lines of a plain text, so a line counts only if the text really contains it.
        if not item.startswith("- ") or item not in text.value or item in first:
            return
        before = len(first) - len(first.lstrip(" "))
        at = text._replace(line=number, column=indent + 1, end=None)
        message = (
            f"{item[:40]!r}, indented by {indent}, is part of the text above it "
            f"({places.span(text.line, before + 1)}), indented by {before}"
        )
        if places.builds_on(places.at(text.line, text.column), places.at(at.line, at.column)):
            message = (
                f"{first.strip()[:40]!r}, indented by {before}, continues with {item[:40]!r} "
                f"({places.span(number, indent + 1)}), indented by {indent}"
            )
            at = text
        hint = "give both the same indent, or quote a text of several lines"
        yield places.finding(at, message, code="FG221", severity=Severity.WARNING, hint=hint)
        return


def unindented_settings(targets: Iterable[Entry]) -> Iterator[Diagnostic]:
    """Yields a warning for each root key that has the name of a setting of the target above it in another file.

    If a child template writes the lines of a block without indent, they become targets instead of settings.
    """
    holder: Entry | None = None
    for entry in targets:
        # Within one file, a target with the name of a setting is more likely meant.
        if holder and _file(entry) != _file(holder) and entry.key in _settings(holder):
            yield Diagnostic(
                code="FG221",
                message=f"{entry.key!r} is at column 0: it is a target of its own and changes nothing in "
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
    return {item.key for item in entries(entry.value)}
