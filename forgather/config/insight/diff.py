"""The differences of two graphs, by path.

The input is two graphs; the output is `Difference` records in the order of the graphs. Invariants: equal graphs have no
difference; a difference inside a shared value is reported once, with its other paths; the contents of a changed value
are compared with the old contents, so that one change is not repeated at every value inside; equal items of two
sequences are paired in order, and an equal item at another position is reported as moved. No function recurses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from forgather.config.graph import (
    Call,
    Container,
    ContainerKind,
    Entry,
    Graph,
    Node,
    Scalar,
    Sequence,
    is_null,
    is_one_object,
    label,
    word_of,
)
from forgather.config.insight.blame import value_text
from forgather.config.insight.change import Change, Difference, Side
from forgather.config.path import GraphPath, Index, Key
from forgather.config.traverse import Step, children, edges, entries
from forgather.source import Origin

_PLACES = 10
_WIDTH = 60
_CONTEXT = 20


def diff(a: Graph, b: Graph) -> tuple[Difference, ...]:
    """Returns the differences from `a` to `b`, in the order of the graphs.

    `SHARED` and `APART` are reported only for values with an identity: calls other than factories, and containers.
    """
    return tuple(_Walk().differences(a, b))


# alignment of the items of two sequences

_MAX_COMPARED = 4_000_000


@dataclass(frozen=True, slots=True)
class Alignment:
    """The pairing of the items of two sequences.

    Args:
        pairs: the pairs of positions in the first and the second sequence, in reading order. None in place of a
            position means that the other item of the pair has no counterpart.
        moved: whether an equal item has another position relative to the other items.
    """

    pairs: tuple[tuple[int | None, int | None], ...]
    moved: bool


class Contents:
    """A numbering of nodes by contents: nodes with equal contents have the same number; sharing is ignored."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._known: dict[Hashable, int] = {}

    def __call__(self, node: Node) -> int:
        """Returns the number of the contents of a node."""
        stack = [node]
        while stack:
            top = stack[-1]
            inside = list(children(top))
            missing = [child for _, child in inside if id(child) not in self._numbers]
            # Children first: a node is numbered by the numbers of its children, without recursion.
            if missing and id(top) not in self._numbers:
                stack.extend(missing)
                continue
            stack.pop()
            parts = tuple((repr(step), self._numbers[id(child)]) for step, child in inside)
            self._numbers[id(top)] = self._known.setdefault((label(top), parts), len(self._known))
        return self._numbers[id(node)]


def align(old: Items[Node], new: Items[Node], contents: Contents) -> Alignment:
    """Returns the pairing of the items of two sequences.

    Equal items are paired first. Between two such pairs, items of the same kind with the same constructor or `@name`
    are paired. If both sequences have equally many items left in between, the items are paired by position.

    Args:
        old: the items of the first graph.
        new: the items of the second graph.
        contents: the numbering of nodes by their contents.
    """
    pairs = list(_stretches(old, new, contents))
    # An item that is missing in one place and new in another was moved; the pair replaces both.
    gone = {contents(old[i]): position for position, (i, j) in enumerate(pairs) if i is not None and j is None}
    moved = False
    for position, (i, j) in enumerate(pairs):
        if i is None and j is not None and contents(new[j]) in gone:
            source = gone.pop(contents(new[j]))
            pairs[position], pairs[source] = (pairs[source][0], j), (None, None)
            moved = True
    return Alignment(pairs=tuple(pair for pair in pairs if pair != (None, None)), moved=moved)


def _stretches(old: Items[Node], new: Items[Node], contents: Contents) -> Iterator[tuple[int | None, int | None]]:
    ours, theirs = [contents(item) for item in old], [contents(item) for item in new]
    opcodes = list(_opcodes(ours, theirs))
    if len(ours) == len(theirs):
        # Of two equal neighbours either may be the one that changed; keeping all positions reports no false move.
        in_place = sum(a != b for a, b in zip(ours, theirs, strict=True))
        if in_place <= sum(max(i2 - i1, j2 - j1) for equal, i1, i2, j1, j2 in opcodes if not equal):
            yield from zip(range(len(ours)), range(len(theirs)), strict=True)
            return
    for equal, i1, i2, j1, j2 in opcodes:
        if equal:
            yield from zip(range(i1, i2), range(j1, j2), strict=True)
            continue
        heads = [_alike(item, number) for number, item in enumerate(old[i1:i2])]
        other = [_alike(item, -1 - number) for number, item in enumerate(new[j1:j2])]
        for same, a1, a2, b1, b2 in _opcodes(heads, other):
            left, right = range(i1 + a1, i1 + a2), range(j1 + b1, j1 + b2)
            if same or len(left) == len(right):
                yield from zip(left, right, strict=True)
            else:
                yield from ((position, None) for position in left)
                yield from ((None, position) for position in right)


def _alike(node: Node, own: int) -> Hashable:
    """Returns a key that is equal for two nodes that may be versions of one item; for a plain value, `own`."""
    return own if isinstance(node, Scalar) else label(node)[:2]


def _opcodes(old: Items[Hashable], new: Items[Hashable]) -> Iterator[tuple[bool, int, int, int, int]]:
    # SequenceMatcher takes quadratic time in the worst case: long sequences are paired by position.
    if len(old) * len(new) > _MAX_COMPARED:
        shorter = min(len(old), len(new))
        yield False, 0, shorter, 0, shorter
        yield False, shorter, len(old), shorter, len(new)
        return
    for word, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        yield word == "equal", i1, i2, j1, j2


# the walk


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A pair of values that are compared, one from each graph, with their paths and entries."""

    above: _Place | None
    steps: tuple[Step, Step]
    old: Node
    new: Node
    old_entry: Entry | None = None
    new_entry: Entry | None = None
    split: bool = False

    @property
    def ids(self) -> tuple[int, int]:
        return id(self.old), id(self.new)

    def path(self, side: int) -> GraphPath:
        steps: list[Step] = []
        place: _Place | None = self
        while place is not None:
            steps.append(place.steps[side])
            place = place.above
        return tuple(steps[::-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A difference at a place, or at a key directly below the place."""

    change: Change
    place: _Place | None
    old: Side
    new: Side
    below: Step | None = None
    partner: GraphPath | None = None


@dataclass(slots=True)
class _Walk:
    """A simultaneous walk over two graphs."""

    contents: Contents = field(default_factory=Contents)
    met: dict[tuple[int, int], list[_Place]] = field(default_factory=dict)
    first: tuple[dict[int, _Place], dict[int, _Place]] = field(default_factory=lambda: ({}, {}))

    def differences(self, a: Graph, b: Graph) -> Iterator[Difference]:
        found: list[_Found] = []
        stack: list[_Place | _Found] = list(_members(None, _roots(a), _roots(b)))[::-1]
        while stack:
            item = stack.pop()
            if isinstance(item, _Found):
                found.append(item)
            else:
                stack.extend(self._compare(item)[::-1])
        for item in found:
            yield Difference(item.change, item.old, item.new, self._also(item), item.partner)

    def _compare(self, place: _Place) -> list[_Place | _Found]:
        # A pair of nodes is compared once, however many paths lead to it; the further paths are reported with it.
        if place.ids in self.met:
            self.met[place.ids].append(place)
            return []
        self.met[place.ids] = [place]
        if not _comparable(place.old, place.new):
            # Contents of different kinds have no counterparts, so the whole value is the difference.
            is_same = type(place.old) is type(place.new) and label(place.old) == label(place.new)
            return [] if is_same else [_value(place)]
        sharing = self._sharing(place)
        inside = _Place(
            place.above, place.steps, place.old, place.new, place.old_entry, place.new_entry,
            place.split or bool(sharing),
        )  # fmt: skip
        self.met[place.ids] = [inside]
        return [*sharing, *_head(inside), *self._inside(inside)]

    def _sharing(self, place: _Place) -> list[_Found]:
        if not _has_identity(place.old) or not _has_identity(place.new):
            return []
        ours = self.first[0].setdefault(id(place.old), place)
        theirs = self.first[1].setdefault(id(place.new), place)
        # Below an object that was split or joined, every shared value is split or joined too: reporting the top is
        # enough.
        if place.split:
            return []
        found = []
        if ours.new is not place.new:
            found.append(_sharing_change(Change.APART, place, ours))
        if theirs.old is not place.old:
            found.append(_sharing_change(Change.SHARED, place, theirs))
        return found

    def _inside(self, place: _Place) -> Iterator[_Place | _Found]:
        if isinstance(place.old, Sequence) and isinstance(place.new, Sequence):
            yield from self._items(place, place.old, place.new)
            return
        # Only in a `!dlist` does the order of keys change the object: it is the order of the list.
        if _is_dlist(place.old):
            yield from _order_of_keys(place)
        yield from _members(place, edges(place.old), edges(place.new))

    def _items(self, place: _Place, old: Sequence, new: Sequence) -> Iterator[_Place | _Found]:
        alignment = align(old.items, new.items, self.contents)
        if alignment.moved:
            yield _Found(Change.ORDER, place, *_sides(place, _listed(old.items), _listed(new.items)))
        for i, j in alignment.pairs:
            if i is not None and j is not None:
                yield _Place(place, (Index(i), Index(j)), old.items[i], new.items[j], split=place.split)
            elif i is not None:
                yield _removed(place, (Index(i), old.items[i], None))
            elif j is not None:
                yield _added(place, (Index(j), new.items[j], None))

    def _also(self, item: _Found) -> tuple[GraphPath, ...]:
        """Returns the further paths of a difference, without paths in definitions, at most `_PLACES`."""
        if item.place is None:
            return ()
        paths: list[GraphPath] = []
        behind: GraphPath = () if item.below is None else (item.below,)
        stack = [(place, behind) for place in self.met[item.place.ids][::-1]]
        while stack and len(paths) <= _PLACES:
            place, behind = stack.pop()
            path = (place.steps[1], *behind)
            if place.above is not None:
                stack.extend([(other, path) for other in self.met[place.above.ids]][::-1])
            elif not str(place.steps[1].name if isinstance(place.steps[1], Key) else "").startswith("."):
                paths.append(path)
        own = item.new.path if item.change is not Change.REMOVED else item.old.path
        return tuple(path for path in paths if path != own)[:_PLACES]


# counterparts

_Edge = tuple[Step, Node, Entry | None]


def _roots(graph: Graph) -> Iterator[_Edge]:
    for entry in (*graph.targets.values(), *graph.definitions):
        yield Key(entry.key), entry.value, entry


def _members(above: _Place | None, old: Iterable[_Edge], new: Iterable[_Edge]) -> Iterator[_Place | _Found]:
    """Yields the pairs of values at the same step and the removed values, then the new values.

    A null in a `!dlist` is treated as a missing value.
    """
    ours, theirs = _numbered(old), _numbered(new)
    nulls = above is not None and _is_dlist(above.new)
    split = above is not None and above.split
    for token, (step, node, entry) in ours.items():
        match = theirs.get(token)
        if match is None:
            if not (nulls and is_null(node)):
                yield _removed(above, (step, node, entry))
        elif nulls and is_null(match[1]) and not is_null(node):
            yield _removed(above, (step, node, entry), by=match[1].origin)
        elif nulls and is_null(node) and not is_null(match[1]):
            yield _added(above, match)
        else:
            yield _Place(above, (step, match[0]), node, match[1], entry, match[2], split)
    for token, edge in theirs.items():
        if token not in ours and not (nulls and is_null(edge[1])):
            yield _added(above, edge)


def _numbered(members: Iterable[_Edge]) -> dict[Hashable, _Edge]:
    """Returns the edges by step and occurrence: definitions may repeat, and a call may have one keyword twice."""
    found: dict[Hashable, _Edge] = {}
    count = Counter[str]()
    for edge in members:
        name = repr(edge[0])
        found[name, count[name]] = edge
        count[name] += 1
    return found


def _comparable(old: Node, new: Node) -> bool:
    """Returns whether the contents of two nodes can be compared."""
    if type(old) is not type(new) or isinstance(old, Scalar):
        return False
    if isinstance(old, (Call, Container)):
        return _is_dlist(old) == _is_dlist(new)
    return label(old) == label(new)


def _is_dlist(node: Node) -> bool:
    return isinstance(node, Container) and node.kind is ContainerKind.DLIST


def _has_identity(node: Node) -> bool:
    return isinstance(node, (Call, Container)) and is_one_object(node, is_aliased=True)


# records of differences


def _head(place: _Place) -> Iterator[_Found]:
    """Yields the differences of two nodes themselves: constructor, kind, name, and which arguments are latent."""
    old, new = place.old, place.new
    if isinstance(old, Call) and isinstance(new, Call):
        if old.constructor != new.constructor:
            yield _Found(Change.CONSTRUCTOR, place, *_sides(place, old.constructor, new.constructor))
        # Moving a keyword to `latent_args` changes when it is built, which no value shows.
        late = {entry.key for entry in old.latent_args} ^ {entry.key for entry in new.latent_args}
        both = {entry.key for entry in entries(old)} & {entry.key for entry in entries(new)}
        for key in sorted(str(key) for key in late & both):
            words = [f"latent {key}" if any(key == entry.key for entry in node.latent_args) else key
                     for node in (old, new)]  # fmt: skip
            yield _Found(Change.KIND, place, *_sides(place, *words))
    if word_of(old) != word_of(new):
        yield _Found(Change.KIND, place, *_sides(place, f"!{word_of(old)}", f"!{word_of(new)}"))
    if old.name != new.name:
        names = [f"@{node.name}" if node.name else "no name" for node in (old, new)]
        yield _Found(Change.NAME, place, *_sides(place, *names))


def _sides(place: _Place, old: str, new: str) -> tuple[Side, Side]:
    return (
        Side(old, place.old.origin, place.path(0), place.old),
        Side(new, place.new.origin, place.path(1), place.new),
    )


def _value(place: _Place) -> _Found:
    old, new = place.old_entry, place.new_entry
    # If only one side has an alias, the change is in the line of the alias.
    moved = (old.alias if old else None) != (new.alias if new else None)
    texts = _texts(place.old, place.new)
    sides = []
    for side, (node, entry) in enumerate(((place.old, old), (place.new, new))):
        aliased = moved and entry is not None and entry.alias not in (None, "<<")
        origin = entry.origin if aliased and entry is not None else node.origin
        sides.append(Side(texts[side], origin, place.path(side), node))
    return _Found(Change.VALUE, place, sides[0], sides[1])


def _texts(old: Node, new: Node) -> tuple[str, str]:
    """Returns both values as text on one line; of two long texts, the part around the first difference."""
    texts = value_text(old), value_text(new)
    if texts[0] != texts[1] or not isinstance(old, Scalar) or not isinstance(new, Scalar):
        return texts
    ours, theirs = str(old.value), str(new.value)
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    begin = max(at - _CONTEXT, 0)
    cut = [repr(text[begin : begin + 2 * _CONTEXT]) for text in (ours, theirs)]
    return f"...{cut[0]}...", f"...{cut[1]}..."


def _sharing_change(change: Change, place: _Place, partner: _Place) -> _Found:
    """Returns the difference of a value that became one object with the value at another path, or that no longer is."""
    sides = [
        Side(value_text(node), entry.origin if entry is not None and entry.alias else node.origin, place.path(n), node)
        for n, (node, entry) in enumerate(((place.old, place.old_entry), (place.new, place.new_entry)))
    ]
    side = 0 if change is Change.APART else 1
    return _Found(change, place, sides[0], sides[1], partner=partner.path(side))


def _order_of_keys(place: _Place) -> Iterator[_Found]:
    keys = [[str(entry.key) for entry in entries(node) if not is_null(entry.value)] for node in (place.old, place.new)]
    # New and removed keys are differences of their own, and say nothing about the order.
    common = set(keys[0]) & set(keys[1])
    old, new = ([key for key in side if key in common] for side in keys)
    if old != new:
        yield _Found(Change.ORDER, place, *_sides(place, f"[{', '.join(old)}]", f"[{', '.join(new)}]"))


def _listed(items: Iterable[Node]) -> str:
    text = ", ".join(value_text(item) for item in items)
    return f"[{text}]" if len(text) <= _WIDTH else f"[{text[: _WIDTH - 3]}...]"


def _removed(above: _Place | None, edge: _Edge, by: Origin | None = None) -> _Found:
    step, node, entry = edge
    # Nothing marks a line as the remover of a key, so it is inferred from what replaced the text around the key.
    if by is None and above is not None:
        by = _remover(entry, above)
    origin = entry.origin if entry is not None else node.origin
    old = Side(_written(node, entry), origin, (*_path(above, 0), step), node)
    return _Found(Change.REMOVED, above, old, Side("", by, _path(above, 1)), step)


def _added(above: _Place | None, edge: _Edge) -> _Found:
    step, node, entry = edge
    origin = entry.origin if entry is not None else node.origin
    new = Side(_written(node, entry), origin, (*_path(above, 1), step), node)
    return _Found(Change.ADDED, above, Side("", None, _path(above, 0)), new, step)


def _path(place: _Place | None, side: int) -> GraphPath:
    return () if place is None else place.path(side)


def _written(node: Node, entry: Entry | None) -> str:
    if entry is not None and entry.alias not in (None, "<<") and not isinstance(node, Scalar):
        return f"*{entry.alias}"
    return value_text(node)


def _remover(entry: Entry | None, above: _Place) -> Origin | None:
    """Returns the line that probably removed a key; None if no line is known.

    The line is that of a new value around the key, or of a key in another template's block that replaces the block of
    the removed key. Templates are compared by name, so that two revisions of one template are the same template.
    """
    old, new = above.old.origin, above.new.origin
    if old is None or new is None:
        return None
    # Another template wrote the whole value around the key.
    if old.site.template != new.site.template:
        return new
    if entry is None or entry.origin is None:
        return None
    before = {other.origin.site.template for other in entries(above.old) if other.origin is not None}
    for other in entries(above.new):
        site = other.origin.site if other.origin is not None else None
        if site is not None and site.block == entry.origin.site.block and site.template not in before:
            return other.origin
    return None
