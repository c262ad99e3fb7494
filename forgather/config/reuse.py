"""Aliases that another template's anchor of the same name took away from the value that they were written for.

Takes anchors and aliases in the order in which they stand, gives findings. Keeps true: an anchor that replaces, wraps
or repeats the earlier value is none, nor is an alias whose template can know of the later anchor.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgather.config.equality import same_value
from forgather.config.events import Event
from forgather.config.graph import Node
from forgather.config.places import Places
from forgather.config.repeats import Template
from forgather.config.traverse import walk
from forgather.errors import Diagnostic, Severity


class Reuse:
    """The anchor names that were used again, and the aliases that follow."""

    def __init__(self) -> None:
        self._values: dict[str, list[Node]] = {}
        self._aliases: list[tuple[Event, Node]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def note_anchor(self, name: str, earlier: Node, later: Node) -> None:
        """Takes an anchor whose name is in use."""
        self._values.setdefault(name, [earlier]).append(later)

    def note_alias(self, event: Event, node: Node) -> None:
        """Takes an alias of a name that was used again, with what it means."""
        self._aliases.append((event, node))

    def findings(self, targets: list[Node], places: Places) -> Iterator[Diagnostic]:
        """Yields a lint for each alias that was written for an earlier value, which is still there."""
        if not self._aliases:
            return
        held = {id(node) for _, node in walk([((), node) for node in targets])}
        for event, node in self._aliases:
            origin = places.at(event.line, event.column)
            writers = {(site.span.file, site.template) for site in origin.sites} if origin else set()
            if not writers or _known(node, writers, places):
                continue
            inside = {id(part) for _, part in walk([((), node)])}
            for earlier in self._values[event.value]:
                if earlier is node:
                    break
                if id(earlier) in held - inside and _known(earlier, writers, places) and not same_value(earlier, node):
                    message = (
                        f"*{event.value} is the value at {node.span}, which used the name of the anchor at "
                        f"{earlier.span} again"
                    )
                    hint = "give the later anchor another name, or put the alias above it"
                    yield places.finding(event, message, code="FG224", severity=Severity.LINT, hint=hint)
                    break


def _known(node: Node, writers: set[Template], places: Places) -> bool:
    """Says whether one of the templates, or one that it extends, has a part in writing a value."""
    sites = node.origin.sites if node.origin else ()
    theirs = {(site.span.file, site.template) for site in sites}
    return bool(theirs & writers) or any((ours, other) in places.descents for ours in writers for other in theirs)
