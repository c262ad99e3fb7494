"""Composes YAML events into nodes, without recursion.

The input is `Event` records, one by one; the output is the root node and, for a config, the entries of the root.
Invariants: an alias is the same object as the node of its anchor; a document that exceeds a limit is refused before it
is built; no document can cause recursion; if possible, reading continues after a mistake, and all mistakes are reported
as one error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from forgather.config.environment import Budget
from forgather.config.graph import CallKind, ContainerKind, Entry, Mapped, Node, Scalar, Sequence
from forgather.config.lint.anchor_reuse import AnchorReuse
from forgather.config.lint.indent_check import IndentSteps
from forgather.config.lint.suspicious_scalars import FIRST, WORDS, lookalike
from forgather.config.path import PlainKey
from forgather.config.tags import TAGS, parse_tag
from forgather.config.yaml.duplicate_keys import Repeat, repeat_findings
from forgather.config.yaml.events import ALIAS, END, MAPPING, SCALAR, SEQUENCE, Event, Refusal
from forgather.config.yaml.merge import MERGE_KEY, with_merges
from forgather.config.yaml.node_builders import (
    STANDARD_CONTAINERS,
    STANDARD_SCALARS,
    standard_scalar,
    tagged_mapping,
    tagged_scalar,
    tagged_sequence,
)
from forgather.config.yaml.scalars import resolve_scalar
from forgather.config.yaml.source_positions import SourcePositions
from forgather.config.yaml.yaml_errors import ErrorCollector
from forgather.errors import BudgetError, Diagnostic, LoadError, Severity, nearest
from forgather.source import Origin

_ODD_BLANKS = tuple("\u00a0\u1680\u2000\u2002\u2003\u2007\u2009\u200b\u202f\u205f\u3000\ufeff")

# Texts that were probably meant as statements of the template language. YAML has consumed the dash of `- include`.
_STATEMENT = re.compile(
    r"--?(include|extends|import|from)\s+(?:['\"]|[\w-]+[./])|--(set)\s+\w+\s*=|--(block|if|for|end\w+)\b"
    r"|(super)(?:\(\))?$|(set)\s+\w+\.\w+\s*="
)
_CALLS = frozenset(f"!{word}" for word, kind in TAGS.items() if isinstance(kind, CallKind))
_CONSTRUCTOR = re.compile(r"[\w./-]+:[A-Za-z_][\w.]*(?:@\w+)?")
_LISTED_STATEMENT = re.compile(r"(include|extends|import|from)\s+(['\"])[\w.-]+[./][\w./-]*\2\s*$")


@dataclass(slots=True)
class _Frame:
    """A sequence or mapping whose end has not been read yet."""

    event: Event
    nodes: list[Node] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Composer:
    """Builds the nodes of one document.

    Args:
        places: the map from positions to origins and errors.
        budget: the limits of the document.
        anchors: further nodes to which aliases may refer, by anchor name.
        is_config: whether the document is a config, in which root keys that begin with a dot are definitions.
    """

    def __init__(
        self,
        places: SourcePositions,
        budget: Budget,
        anchors: Mapping[str, Node] | None = None,
        *,
        is_config: bool = True,
    ) -> None:
        self.anchors: dict[str, Node] = dict(anchors or {})
        self.names: dict[int, str] = {}
        self.anchored: list[Node] = []
        self.diagnostics: list[Diagnostic] = []
        self.indents = IndentSteps()
        self.reuse = AnchorReuse()
        self.faults = ErrorCollector()
        self.root: Node | None = None
        self.root_entries: tuple[Entry, ...] = ()
        self.definitions: tuple[Entry, ...] = ()
        self._is_config = is_config
        self._places = places
        self._budget = budget
        self._frames: list[_Frame] = []
        self._entries: dict[int, tuple[Entry, ...]] = {}
        self._weights: dict[int, tuple[int, int]] = {}
        self._kept: list[Node] = []
        self._events = 0
        self._merged = 0

    def feed(self, event: Event) -> None:
        """Adds the next event.

        Raises:
            LoadError: FG2xx if the event has no meaning in the config language; the span is the place of the event.
            BudgetError: FG220 if the document exceeds a limit.
        """
        kind = event.kind
        if kind is END:
            self._close()
            return
        self._events += 1
        if self._events > self._budget.max_nodes:
            raise self._over(event, f"more than {self._budget.max_nodes} values", "split the data off into a file")
        if kind is SCALAR:
            self._add(self._named(event, self._scalar(event)), event)
        elif kind is ALIAS:
            self._add(self._alias(event), event)
        else:
            self._open(event)

    # one event

    def _open(self, event: Event) -> None:
        if len(self._frames) >= self._budget.max_depth:
            raise self._over(event, f"nested deeper than {self._budget.max_depth}", "use fewer levels")
        self._frames.append(_Frame(event))

    def _close(self) -> None:
        frame = self._frames.pop()
        event = frame.event
        node = self._guarded(event, lambda: self._sequence(frame) if event.kind is SEQUENCE else self._mapping(frame))
        # Weighed when it closes, with all that its aliases add: a document that would explode is refused here.
        self._weigh(frame, node)
        if event.kind is MAPPING and not event.flow and frame.events and self._frames:
            # An odd number of events in a mapping means that the last one is a key, whose value this mapping is.
            above = self._frames[-1]
            if above.event.kind is MAPPING and len(above.events) % 2:
                self.indents.note(above.events[-1], frame.events[0])
        self._add(self._named(event, node), event)

    def _add(self, node: Node, event: Event) -> None:
        if not self._frames:
            self.root = node
            return
        frame = self._frames[-1]
        frame.nodes.append(node)
        frame.events.append(event)

    def _named(self, event: Event, node: Node) -> Node:
        if event.anchor is not None:
            if event.anchor in self.anchors:
                self.reuse.note_anchor(event, self.anchors[event.anchor], node)
            self.anchors[event.anchor] = node
            # The first anchor of a node is the name that printing uses.
            self.names.setdefault(id(node), event.anchor)
            self.anchored.append(node)
        return node

    def _alias(self, event: Event) -> Node:
        name = event.value
        for frame in self._frames:
            # The anchor of an open container is not yet in `anchors`, so the cycle is found by the frames.
            if frame.event.anchor == name:
                where = f"which begins at {self._places.span(frame.event.line, frame.event.column)}"
                message = f"*{name} is inside &{name}, {where}: a value cannot contain itself"
                raise self._fault(event, message, "FG205", "refer to a part of it, or make the reference in Python")
        node = self.anchors.get(name)
        if node is None:
            below = self._places.anchor_below(name, event.line)
            hint = f"&{name} is defined below, at {below}; move it above this line" if below else None
            hint = hint or nearest(name, list(self.anchors)) or f"define it above with &{name}"
            fault = self._fault(event, f"*{name} refers to an anchor that is not defined above it", "FG203", hint)
            return self._placeholder(fault, event)
        self.reuse.aliased.add(id(node))
        if name in self.reuse:
            self.reuse.note_alias(event, node)
        return node

    def _scalar(self, event: Event) -> Node:
        origin = self._places.origin(event)
        # A quoted or block scalar without a tag is a string, whatever it looks like.
        if event.tag is None and not event.plain:
            return Scalar(origin=origin, value=event.value)
        digits = self._budget.max_integer_digits
        # `! call:torch` is YAML's non-specific tag before a text, never what was meant.
        if event.tag == "!" and event.value.split(":")[0] in TAGS:
            message = f"a space after '!': the tag ends before {event.value[:60]!r}"
            raise self._fault(event, message, "FG211", "write the tag without spaces: !" + event.value.split()[0])
        if event.tag is None:
            self._refuse_statement(event)
            if event.value[:1] == "<" and event.value == MERGE_KEY:
                return Scalar(origin=origin, value=MERGE_KEY)
            try:
                value = resolve_scalar(event.value, digits)
            except Refusal as refusal:
                raise self._refused(event, refusal) from None
            # Cheap tests first: this runs for every plain string of a document.
            if value is event.value and (value in WORDS or value[0] in FIRST or "- " in value):
                self._note_odd(event)
            return Scalar(origin=origin, value=value, written=None if value is event.value else event.value)
        if event.tag in STANDARD_SCALARS:
            return self._guarded(event, lambda: standard_scalar(event.tag or "", event, origin, digits))
        return self._guarded(event, lambda: self._tagged_scalar(event, origin))

    def _note_odd(self, event: Event) -> None:
        """Records a string that may have been meant as a number, or that YAML may have made of several list items."""
        # A value of `--set` is typed on purpose, and a key such as `on:` is a word.
        if not self._is_config or self._at_key():
            return
        if "- " in event.value:
            self.indents.note_text(event)
        if hint := lookalike(event.value):
            message = f"{event.value!r} is a string here, but looks like another type"
            finding = self._places.finding(event, message, code="FG222", severity=Severity.LINT, hint=hint)
            self.diagnostics.append(finding)

    def _refuse_statement(self, event: Event) -> None:
        frame = self._frames[-1] if self._frames else None
        # In `[include, extends]` the words are items.
        if not self._is_config or (frame is not None and frame.event.flow):
            return
        listed = frame is not None and frame.event.kind is SEQUENCE
        found = (_LISTED_STATEMENT if listed else _STATEMENT).match(event.value)
        if found is None or not (listed or self._places.opens_line(event)):
            return
        # The alternatives of the pattern have one group each, of which the matching one is not None.
        word = next(group for group in found.groups() if group)
        raise self._fault(
            event,
            f"{self._places.rendered_line(event.line).strip()[:60]!r} is read as text, not as a statement",
            "FG200",
            f"did you mean `{'== super()' if word == 'super' else f'-- {word}'}`? Put a text in quotes",
        )

    def _tagged_scalar(self, event: Event, origin: Origin | None) -> Node:
        try:
            tag = parse_tag(event.tag or "")
        except Refusal as refusal:
            if event.plain and ":" in event.value:
                behind = event.value.split()[0]
                message = f"a space inside the tag: {event.tag!r} ends at the space before {behind[:60]!r}"
                hint = "a tag cannot contain spaces; rename what it refers to"
                # `!call torch:randn` is one missing colon away from being right.
                if event.tag in _CALLS and _CONSTRUCTOR.fullmatch(behind):
                    hint = f"write ':' in place of the space: {event.tag}:{behind}"
                raise Refusal("FG211", message, hint) from None
            raise refusal from None
        return tagged_scalar(tag, event, origin, self._budget.max_integer_digits)

    # containers

    def _sequence(self, frame: _Frame) -> Node:
        event, items = frame.event, tuple(frame.nodes)
        origin = self._places.origin(event)
        # Items have no key, so an alias among them is kept as an entry of its position.
        marks = tuple(
            Entry(position, items[position], place := self._places.origin(item), (), item.value, _line(place))
            for position, item in enumerate(frame.events)
            if item.kind is ALIAS
        )
        if event.tag is None or event.tag in STANDARD_CONTAINERS:
            return Sequence(origin=origin, kind=ContainerKind.LIST, items=items, marks=marks)
        return tagged_sequence(parse_tag(event.tag), items, origin, marks)

    def _mapping(self, frame: _Frame) -> Node:
        event = frame.event
        is_root = self._is_config and not self._frames
        entries = self._merged_entries(frame, is_root)
        origin = self._places.origin(event)
        if event.tag is None or event.tag in STANDARD_CONTAINERS:
            node: Node = Mapped(origin=origin, kind=ContainerKind.DICT, entries=entries)
        else:
            node = tagged_mapping(parse_tag(event.tag), entries, origin)
        if is_root:
            self.root_entries = entries
        else:
            self._entries[id(node)] = entries
        return node

    def _merged_entries(self, frame: _Frame, is_root: bool) -> tuple[Entry, ...]:
        explicit: list[Entry] = []
        lines: dict[int, Event] = {}
        definitions: list[Entry] = []
        merges: list[tuple[Origin | None, list[tuple[Entry, ...]]]] = []
        nodes, events = frame.nodes, frame.events
        for at in range(0, len(nodes), 2):
            key, value, key_event = nodes[at], nodes[at + 1], events[at]
            # Only a plain `<<` merges; a quoted one is a key.
            if key_event.plain and key_event.value == MERGE_KEY and key_event.kind is SCALAR and key_event.tag is None:
                merges.append((key.origin, self._merge_sources(value, events[at + 1])))
                continue
            alias: tuple[str | None, tuple[Origin, ...]] = (None, ())
            if events[at + 1].kind is ALIAS:
                alias = events[at + 1].value, _line(self._places.origin(events[at + 1]))
            entry = Entry(self._key(key, key_event), value, key.origin, (), *alias)
            # Definitions may repeat freely; each keeps its own value.
            if is_root and isinstance(entry.key, str) and entry.key.startswith("."):
                definitions.append(entry)
            else:
                explicit.append(entry)
                lines[id(entry)] = key_event
        if is_root:
            self.definitions = tuple(definitions)
        # The common case, without copies.
        if not merges and len({entry.key for entry in explicit}) == len(explicit):
            return tuple(explicit)
        return with_merges(explicit, merges, self._places.descents, lambda repeat: self._repeated(repeat, lines))

    def _key(self, node: Node, event: Event) -> PlainKey:
        if isinstance(node, Scalar):
            if event.plain and event.value[:1] in _ODD_BLANKS:
                message = f"U+{ord(event.value[0]):04X} before a key looks like a space, but is part of the key"
                raise self._fault(event, message, "FG219", "indent with plain spaces")
            return node.value
        if isinstance(node, Sequence) and not node.tagged and all(isinstance(item, Scalar) for item in node.items):
            return tuple(item.value for item in node.items if isinstance(item, Scalar))
        found = f"the tag {event.tag!r}" if event.tag else "a mapping or a nested sequence"
        raise self._fault(
            event, f"a key cannot be {found}", "FG217", "a key is a plain value, or a sequence of plain values"
        )

    def _merge_sources(self, value: Node, event: Event) -> list[tuple[Entry, ...]]:
        plain_sequence = isinstance(value, Sequence) and id(value) not in self._entries
        sources = value.items if isinstance(value, Sequence) and plain_sequence else (value,)
        found: list[tuple[Entry, ...]] = []
        for source in sources:
            # `_entries` also has the keys of tagged mappings, such as the arguments of a call, which `<<` may merge. A
            # value that could not be read was reported already, and merges nothing.
            entries = () if source in self.faults else self._entries.get(id(source))
            if entries is None:
                entries = source.entries if isinstance(source, Mapped) else None
            if entries is None:
                message = "'<<' merges something that is not a mapping"
                raise self._fault(
                    event, message, "FG218", "write <<: *name of a mapping, or <<: [*a, *b]; quote '<<' if it is a key"
                )
            # Merging a large mapping into thousands of others costs no nodes, so the copies are counted apart.
            self._merged += len(entries)
            if self._merged > self._budget.max_nodes:
                raise self._over(event, f"merge keys copy more than {self._budget.max_nodes} entries", "merge less")
            found.append(entries)
        return found

    def _repeated(self, repeat: Repeat, lines: Mapping[int, Event]) -> None:
        is_root = self._is_config and not self._frames
        try:
            self.diagnostics += repeat_findings(repeat, lines[id(repeat.later)], self._places, is_root=is_root)
        except LoadError as fault:
            self.faults.note(fault)

    # budgets and errors

    def _weigh(self, frame: _Frame, node: Node) -> None:
        size, depth = 1, 0
        for child in frame.nodes:
            child_size, child_depth = self._weights.get(id(child), (1, 0))
            size += child_size
            depth = max(depth, child_depth)
        if size > self._budget.max_nodes:
            message = f"this value has more than {self._budget.max_nodes} parts once its aliases are followed"
            raise self._over(frame.event, message, "use fewer or smaller aliased values")
        # Aliases can nest deeper than the text does.
        if depth >= self._budget.max_depth:
            message = f"nested deeper than {self._budget.max_depth} once its aliases are followed"
            raise self._over(frame.event, message, "use fewer levels")
        self._weights[id(node)] = (size, depth + 1)
        # The ids in the tables stay unique only while the nodes exist.
        self._kept.append(node)
        self._kept.extend(frame.nodes)

    def _guarded(self, event: Event, make: Callable[[], Node]) -> Node:
        try:
            return make()
        except Refusal as refusal:
            return self._placeholder(self._refused(event, refusal), event)

    def _placeholder(self, fault: LoadError | BudgetError, event: Event) -> Node:
        return self.faults.placeholder(fault, self._places.origin(event), is_key=self._at_key())

    def _at_key(self) -> bool:
        frame = self._frames[-1] if self._frames else None
        return frame is not None and frame.event.kind is MAPPING and not len(frame.events) % 2

    def _refused(self, event: Event, refusal: Refusal) -> LoadError | BudgetError:
        if refusal.code == "FG220":
            return self._over(event, refusal.message, refusal.hint)
        fault = self._fault(event, refusal.message, refusal.code, refusal.hint)
        fault.span = refusal.span or fault.span
        return fault

    def _fault(self, event: Event, message: str, code: str, hint: str | None) -> LoadError:
        return self._places.fault_at(event, message, code=code, hint=hint)

    def _over(self, event: Event, message: str, hint: str | None) -> BudgetError:
        return self._places.fault(message, event.line, event.column, code="FG220", hint=hint, kind=BudgetError)


def _line(place: Origin | None) -> tuple[Origin, ...]:
    return () if place is None else (place,)
