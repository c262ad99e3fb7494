"""Equality of values and of graphs, by structure and by which paths share a node; origins are ignored.

The input is two nodes or two graphs; the output is a boolean. Invariant: two graphs are equal if construction gives
equal objects, and the same paths lead to one object; the lines that wrote the values do not matter.
"""

from __future__ import annotations

from forgather.config.graph import Entry, Graph, Node, Scalar, label
from forgather.config.traverse import children


def same_value(a: Node, b: Node) -> bool:
    """Returns whether two nodes are equal. Whether they share nodes at the same paths is ignored."""
    return _Comparison(sharing=False).nodes([(a, b)])


def same_graph(a: Graph, b: Graph) -> bool:
    """Returns whether two graphs have equal targets and definitions, and share nodes at the same paths."""
    ours, theirs = _entries(a), _entries(b)
    if list(a.targets) != list(b.targets) or [entry.key for entry in ours] != [entry.key for entry in theirs]:
        return False
    pairs = [(x.value, y.value) for x, y in zip(ours, theirs, strict=True)]
    return _Comparison(sharing=True).nodes(pairs)


def _entries(graph: Graph) -> list[Entry]:
    return [*graph.definitions, *graph.targets.values()]


class _Comparison:
    """A simultaneous walk over two graphs.

    If `sharing` is true, each node must have exactly one counterpart. Plain scalars are exempt, because the identity of
    equal numbers is not visible in Python.
    """

    def __init__(self, *, sharing: bool) -> None:
        self._sharing = sharing
        self._forth: dict[int, int] = {}
        self._back: dict[int, int] = {}
        self._met: set[tuple[int, int]] = set()

    def nodes(self, pairs: list[tuple[Node, Node]]) -> bool:
        stack = list(pairs)
        while stack:
            a, b = stack.pop()
            # With `sharing`, the counterparts must be recorded even for one and the same node.
            if a is b and not self._sharing:
                continue
            if label(a) != label(b) or not self._counterparts(a, b):
                return False
            if isinstance(a, Scalar):
                continue
            if (id(a), id(b)) in self._met:
                continue
            self._met.add((id(a), id(b)))
            ours, theirs = list(children(a)), list(children(b))
            # By repr, because the keys 1 and True are equal in Python and different in a config.
            if [repr(step) for step, _ in ours] != [repr(step) for step, _ in theirs]:
                return False
            stack.extend((x, y) for (_, x), (_, y) in zip(ours, theirs, strict=True))
        return True

    def _counterparts(self, a: Node, b: Node) -> bool:
        if not self._sharing or isinstance(a, Scalar):
            return True
        # Both directions: two nodes must not share one counterpart either.
        return self._forth.setdefault(id(a), id(b)) == id(b) and self._back.setdefault(id(b), id(a)) == id(a)
