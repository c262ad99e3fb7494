"""Which item of one sequence is which item of another.

Takes two sequences of nodes, gives pairs of positions and the items that have no counterpart. Keeps true: equal items
stay together in order; what is equal but stands elsewhere has moved, and was neither removed nor added.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from forgather.config.graph import Node, Scalar, label
from forgather.config.traverse import children

_MAX_COMPARED = 4_000_000


@dataclass(frozen=True, slots=True)
class Alignment:
    """How two sequences lie beside one another.

    Args:
        pairs: positions in the first and the second sequence, in reading order; None on one side means that the item
            of the other side has no counterpart.
        moved: True where an equal item stands at another place among the others.
    """

    pairs: tuple[tuple[int | None, int | None], ...]
    moved: bool


class Contents:
    """Numbers for what nodes hold: two nodes have the same number when they mean the same, whatever is shared."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._known: dict[Hashable, int] = {}

    def __call__(self, node: Node) -> int:
        """Returns the number of a node."""
        stack = [node]
        while stack:
            top = stack[-1]
            inside = list(children(top))
            missing = [child for _, child in inside if id(child) not in self._numbers]
            if missing and id(top) not in self._numbers:
                stack.extend(missing)
                continue
            stack.pop()
            parts = tuple((repr(step), self._numbers[id(child)]) for step, child in inside)
            self._numbers[id(top)] = self._known.setdefault((label(top), parts), len(self._known))
        return self._numbers[id(node)]


def align(old: Sequence[Node], new: Sequence[Node], contents: Contents) -> Alignment:
    """Returns which item of `new` is which item of `old`.

    Equal items are paired first, then items of the same constructor between them, then, in a stretch of equal length,
    those at the same place.
    """
    pairs = list(_stretches(old, new, contents))
    gone = {contents(old[i]): position for position, (i, j) in enumerate(pairs) if i is not None and j is None}
    moved = False
    for position, (i, j) in enumerate(pairs):
        if i is None and j is not None and contents(new[j]) in gone:
            source = gone.pop(contents(new[j]))
            pairs[position], pairs[source] = (pairs[source][0], j), (None, None)
            moved = True
    return Alignment(pairs=tuple(pair for pair in pairs if pair != (None, None)), moved=moved)


def _stretches(old: Sequence[Node], new: Sequence[Node], contents: Contents) -> Iterator[tuple[int | None, int | None]]:
    ours, theirs = [contents(item) for item in old], [contents(item) for item in new]
    opcodes = list(_opcodes(ours, theirs))
    if len(ours) == len(theirs):
        # Of two equal neighbors either may be the one that changed: no item has moved, then, and each keeps its place.
        in_place = sum(a != b for a, b in zip(ours, theirs, strict=True))
        if in_place <= sum(max(i2 - i1, j2 - j1) for equal, i1, i2, j1, j2 in opcodes if not equal):
            yield from zip(range(len(ours)), range(len(theirs)), strict=True)
            return
    for equal, i1, i2, j1, j2 in opcodes:
        if equal:
            yield from zip(range(i1, i2), range(j1, j2), strict=True)
            continue
        heads = [_head(item, number) for number, item in enumerate(old[i1:i2])]
        other = [_head(item, -1 - number) for number, item in enumerate(new[j1:j2])]
        for same, a1, a2, b1, b2 in _opcodes(heads, other):
            left, right = range(i1 + a1, i1 + a2), range(j1 + b1, j1 + b2)
            if same or len(left) == len(right):
                yield from zip(left, right, strict=True)
            else:
                yield from ((position, None) for position in left)
                yield from ((None, position) for position in right)


def _head(node: Node, own: int) -> Hashable:
    """What tells that a changed item is still the same item; a plain value is never another one."""
    return own if isinstance(node, Scalar) else label(node)[:2]


def _opcodes(old: Sequence[Hashable], new: Sequence[Hashable]) -> Iterator[tuple[bool, int, int, int, int]]:
    if len(old) * len(new) > _MAX_COMPARED:
        shorter = min(len(old), len(new))
        yield False, 0, shorter, 0, shorter
        yield False, shorter, len(old), shorter, len(new)
        return
    for word, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        yield word == "equal", i1, i2, j1, j2
