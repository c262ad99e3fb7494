"""Aliases that another template's anchor of the same name took away from the value that they were written for.

Takes anchors and aliases in the order in which they stand, gives findings. Keeps true: an anchor that replaces, wraps
or repeats the earlier value is none, nor is one that the template of the alias can know of and may have meant.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgather.config.equality import same_value
from forgather.config.graph import Node
from forgather.config.traverse import walk
from forgather.config.yaml.events import Event
from forgather.config.yaml.source_positions import Places, Template, template_of
from forgather.errors import Diagnostic, Severity


class Reuse:
    """The anchor names that were used again, and the aliases that follow."""

    def __init__(self) -> None:
        self.aliased: set[int] = set()
        self._values: dict[str, list[Node]] = {}
        self._anchors: dict[int, Event] = {}
        self._idle: set[int] = set()
        self._aliases: list[tuple[Event, Node]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def note_anchor(self, event: Event, earlier: Node, later: Node) -> None:
        """Takes an anchor whose name is in use."""
        self._values.setdefault(event.anchor or "", [earlier]).append(later)
        self._anchors[id(later)] = event
        if id(earlier) not in self.aliased:
            self._idle.add(id(earlier))

    def note_alias(self, event: Event, node: Node) -> None:
        """Takes an alias of a name that was used again, with what it means."""
        self._aliases.append((event, node))

    def findings(self, targets: list[Node], places: Places) -> Iterator[Diagnostic]:
        """Yields a lint for each later anchor that took an alias from an earlier value, which is still there."""
        if not self._aliases:
            return
        held = {id(node) for _, node in walk([((), node) for node in targets])}
        told: set[int] = set()
        for alias, node in self._aliases:
            if id(node) in told or id(node) not in self._anchors:
                continue
            inside = {id(part) for _, part in walk([((), node)])}
            for earlier in self._earlier(alias.value, node):
                if id(earlier) not in held - inside or same_value(earlier, node):
                    continue
                if self._took(alias, earlier, node, places):
                    told.add(id(node))
                    yield _finding(self._anchors[id(node)], alias, earlier, places)
                    break

    def _earlier(self, name: str, node: Node) -> Iterator[Node]:
        for value in self._values[name]:
            if value is node:
                return
            yield value

    def _took(self, alias: Event, earlier: Node, later: Node, places: Places) -> bool:
        """Says whether an alias was written for the earlier of two values.

        It was where its template can know of that one only; and where one template writes all three, and nothing used
        the earlier anchor before its name was used again.
        """
        origin = places.at(alias.line, alias.column)
        writers = {template_of(site) for site in origin.sites} if origin else set()
        if not _known(earlier, writers, places):
            return False
        if not _known(later, writers, places):
            return True
        return id(earlier) in self._idle and _writers(earlier) == _writers(later) == writers


def _finding(anchor: Event, alias: Event, earlier: Node, places: Places) -> Diagnostic:
    message = (
        f"&{anchor.anchor} names the value at {earlier.span} already, and *{anchor.anchor} at "
        f"{places.span(alias.line, alias.column)} now means this one"
    )
    hint = "give this anchor another name"
    return places.finding(anchor, message, code="FG224", severity=Severity.LINT, hint=hint)


def _writers(node: Node) -> set[Template]:
    return {template_of(site) for site in node.origin.sites} if node.origin else set()


def _known(node: Node, writers: set[Template], places: Places) -> bool:
    """Says whether one of the templates, or one that it extends, has a part in writing a value."""
    theirs = _writers(node)
    return bool(theirs & writers) or any((ours, other) in places.descents for ours in writers for other in theirs)
