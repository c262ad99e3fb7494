"""Aliases that refer to another value than was meant, because a later anchor has the same name.

The input is anchors and aliases in the order of the document; the output is findings. Invariants: there is no finding
for an anchor that replaces, wraps or repeats the earlier value. If the template of the alias also writes or extends the
later anchor, there is a finding only if one template wrote the alias and both anchors, and nothing used the earlier
anchor.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgather.config.equality import same_value
from forgather.config.graph import Node
from forgather.config.traverse import walk
from forgather.config.yaml.events import Event
from forgather.config.yaml.source_positions import SourcePositions, Template, template_of
from forgather.errors import Diagnostic, Severity


class AnchorReuse:
    """The anchor names that a document uses again, and the aliases of these names."""

    def __init__(self) -> None:
        self.aliased: set[int] = set()
        self._values: dict[str, list[Node]] = {}
        self._anchors: dict[int, Event] = {}
        self._idle: set[int] = set()
        self._aliases: list[tuple[Event, Node]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def note_anchor(self, event: Event, earlier: Node, later: Node) -> None:
        """Records an anchor whose name is already in use.

        Args:
            event: the event of the new anchor.
            earlier: the value to which the name referred before.
            later: the value of the new anchor.
        """
        self._values.setdefault(event.anchor or "", [earlier]).append(later)
        self._anchors[id(later)] = event
        # An anchor without any alias before its name is used again was perhaps forgotten.
        if id(earlier) not in self.aliased:
            self._idle.add(id(earlier))

    def note_alias(self, event: Event, node: Node) -> None:
        """Records an alias of a name that is used again, and the node to which the alias refers."""
        self._aliases.append((event, node))

    def findings(self, targets: list[Node], places: SourcePositions) -> Iterator[Diagnostic]:
        """Yields a lint for each later anchor that has an alias which was probably meant for an earlier value.

        Args:
            targets: the nodes of the targets.
            places: the map from positions in the rendered text to places in the user's files.
        """
        if not self._aliases:
            return
        # An earlier value that is no longer in any target was replaced on purpose.
        held = {id(node) for _, node in walk([((), node) for node in targets])}
        reported: set[int] = set()
        for alias, node in self._aliases:
            if id(node) in reported or id(node) not in self._anchors:
                continue
            # `x: &x [*x, more]` wraps the earlier value, which is then still meant.
            inside = {id(part) for _, part in walk([((), node)])}
            for earlier in self._earlier(alias.value, node):
                if id(earlier) not in held - inside or same_value(earlier, node):
                    continue
                if self._was_meant(alias, earlier, node, places):
                    reported.add(id(node))
                    yield _finding(self._anchors[id(node)], alias, earlier, places)
                    break

    def _earlier(self, name: str, node: Node) -> Iterator[Node]:
        for value in self._values[name]:
            if value is node:
                return
            yield value

    def _was_meant(self, alias: Event, earlier: Node, later: Node, places: SourcePositions) -> bool:
        """Returns whether an alias was probably meant for the earlier of two values.

        There are two such cases. In the first, the template of the alias wrote the earlier value, or extends the
        template that wrote it, and neither holds for the later value. In the second, one template wrote the alias and
        both values, and nothing used the earlier anchor before its name was used again.
        """
        origin = places.at(alias.line, alias.column)
        writers = {template_of(site) for site in origin.sites} if origin else set()
        if not _known(earlier, writers, places):
            return False
        if not _known(later, writers, places):
            return True
        return id(earlier) in self._idle and _writers(earlier) == _writers(later) == writers


def _finding(anchor: Event, alias: Event, earlier: Node, places: SourcePositions) -> Diagnostic:
    message = (
        f"&{anchor.anchor} is already the anchor of the value at {earlier.span}; *{anchor.anchor} at "
        f"{places.span(alias.line, alias.column)} now refers to this one"
    )
    hint = "give this anchor another name"
    return places.finding(anchor, message, code="FG224", severity=Severity.LINT, hint=hint)


def _writers(node: Node) -> set[Template]:
    return {template_of(site) for site in node.origin.sites} if node.origin else set()


def _known(node: Node, writers: set[Template], places: SourcePositions) -> bool:
    """Returns whether a value was written by one of the templates, or by a template that one of them extends."""
    theirs = _writers(node)
    return bool(theirs & writers) or any((ours, other) in places.descents for ours in writers for other in theirs)
