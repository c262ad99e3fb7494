"""The line that wrote each value of a config, and the values that it replaced.

The input is a graph; the output is a `Blame` for each path in the graph. Invariants: a shared value has a `Blame` at
each of its paths; replaced values are ordered from the last to the first that was written; nothing is imported or
built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from forgather.config.graph import Container, Entry, Graph, Lookup, Node, Scalar, Sequence, describe
from forgather.config.path import GraphPath, Key
from forgather.config.traverse import Step, children, edges, written_nodes
from forgather.config.yaml.scalar_text import key_text, scalar_text
from forgather.source import Origin

_WIDTH = 60
# The history of a value is bounded, because each container above it may have one, too.
_STOPS = 40


@dataclass(frozen=True, slots=True)
class Writing:
    """A value as one line wrote it.

    Args:
        node: the node of the value.
        text: the value as YAML on one line; for a long container, its kind and size.
        origin: the lines that wrote the value; None if it was made in Python.
        alias: the name of the anchor through which the path reaches the value, or `<<` for a merge key; None if the
            value is written at the path itself.
        through: the lines of the aliases and merge keys that lead to the value, nearest first.
    """

    node: Node
    text: str
    origin: Origin | None
    alias: str | None = None
    through: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class Blame:
    """A value, the line that wrote it, and the values that it replaced.

    Args:
        path: the path of the value in the graph.
        node: the node of the value.
        now: the line that wrote the effective value, as a `Writing`.
        was: the replaced values, as `Writing` records, nearest first.
        around: the aliases in front of the value on its path, each as its name and line, nearest first.
    """

    path: GraphPath
    node: Node
    now: Writing
    was: tuple[Writing, ...] = ()
    around: tuple[tuple[str, Origin], ...] = ()


def blame(
    graph: Graph,
    tops: Iterable[tuple[GraphPath, Node]] | None = None,
    *,
    aliases: bool = True,
    depth: int | None = None,
) -> Iterator[Blame]:
    """Yields the `Blame` of each value, parents before their contents.

    Args:
        graph: the config.
        tops: the paths and nodes of `graph` to begin with; None to begin with its targets and definitions.
        aliases: whether the contents of an aliased value are also yielded at the path of the alias. If not, they are
            yielded only at the path where the value is written.
        depth: the number of levels below each of `tops` to visit; None to visit all levels.
    """
    # A node that is only reached through aliases is written at no path of its own, so its first alias shows the
    # contents.
    elsewhere = frozenset() if aliases else frozenset(written_nodes(graph))
    places = _roots(graph) if tops is None else (_top(graph, path, node) for path, node in tops)
    for top in places:
        path, node = top.path, top.node
        if tops is None and not aliases and _is_alias(top.entry) and id(node) in elsewhere:
            # The contents are shown where the node is written, and must not be repeated here.
            yield _blamed(top)
        else:
            yield from _inside(top, elsewhere, len(path) + depth if depth is not None else None)


def _is_alias(entry: Entry | None) -> bool:
    return entry is not None and entry.alias is not None


@dataclass(frozen=True, slots=True)
class _Place:
    """A value at a path, the key that leads to it, and the entries that it replaced at that path."""

    path: GraphPath
    node: Node
    entry: Entry | None
    shadows: tuple[Entry, ...]
    around: tuple[tuple[str, Origin], ...] = ()

    def inside(self) -> Iterator[_Place]:
        """Yields the places of the values directly inside the value of this place."""
        entry, around = self.entry, self.around
        if entry is not None and entry.alias is not None:
            # Values inside an aliased node are reached through the alias as well, which is what a reader of the path
            # sees.
            around = (*((entry.alias, origin) for origin in entry.through), *around)
        for step, child, inner in edges(self.node):
            yield _Place((*self.path, step), child, inner, _shadows(step, inner, self.shadows), around)


def _inside(place: _Place, elsewhere: AbstractSet[int], depth: int | None) -> Iterator[Blame]:
    stack, top = [place], place
    while stack:
        place = stack.pop()
        yield _blamed(place)
        if place is not top and _is_alias(place.entry) and id(place.node) in elsewhere:
            continue
        if depth is not None and len(place.path) >= depth:
            continue
        # Reversed, so that the stack gives the children in order; a graph may be deeper than Python's recursion limit.
        stack.extend([*place.inside()][::-1])


def _blamed(place: _Place) -> Blame:
    was = tuple([_writing(entry.value, entry) for entry in place.shadows])
    return Blame(place.path, place.node, _writing(place.node, place.entry), was, place.around)


def _roots(graph: Graph) -> Iterator[_Place]:
    for entry in (*graph.targets.values(), *graph.definitions):
        yield _Place((Key(entry.key),), entry.value, entry, entry.replaced)


def _top(graph: Graph, path: GraphPath, node: Node) -> _Place:
    """Returns the place of a path, with the entries that were replaced at the path or at a container around it."""
    first, *rest = path
    name = first.name if isinstance(first, Key) else None
    tops = (*graph.targets.values(), *graph.definitions)
    entry = next((item for item in tops if item.key == name and (rest or item.value is node)), None)
    place = _Place((first,), entry.value if entry else node, entry, entry.replaced if entry else ())
    for step in rest:
        found = next((inner for inner in place.inside() if inner.path[-1] == step), None)
        if found is None:
            break
        place = found

    return place if place.node is node else _Place(path, node, None, ())


def _shadows(step: Step, entry: Entry | None, above: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Returns the replaced entries of a place: those of its key, then those inside replaced containers around it."""
    own = entry.replaced if entry is not None else ()
    if not above:
        return own
    found = list(own)
    for earlier in above:
        for other, child, inner in edges(earlier.value):
            if other == step:
                # An item of a sequence has no entry; its value alone is known.
                found += [inner or Entry(None, child), *(inner.replaced if inner else ())]
    return tuple(found[:_STOPS])


def _writing(node: Node, entry: Entry | None) -> Writing:
    if entry is None:
        return Writing(node, value_text(node), node.origin)
    return Writing(node, value_text(node), _origin(node, entry), entry.alias, entry.through)


def _origin(node: Node, entry: Entry) -> Origin | None:
    """Returns the origin of a value; for a container in block style, the origin of its key, not of its first member."""
    own, key = node.origin, entry.origin
    # A tag is written where the container begins, and an alias where it is used, so their own origins are right.
    if not isinstance(node, Container) or node.tagged or entry.alias is not None:
        return own
    if own is None or key is None or isinstance(entry.key, int):
        return own
    # A flow container (`[1, 2]`) begins on the line of its key, where its own origin is as good.
    same_line = own.site.template == key.site.template and own.span.line == key.span.line
    return own if same_line else key


def value_text(node: Node) -> str:
    """Returns a value as YAML on one line; for a long container, its kind and size.

    Example:
        >>> from forgather.config.graph import ContainerKind
        >>> value_text(Sequence(kind=ContainerKind.LIST, items=(Scalar(value=0.9), Scalar(value="a b"))))
        '[0.9, a b]'
    """
    if isinstance(node, Scalar):
        # As it was written: `3e-4` rather than 0.0003.
        return _shortened(scalar_text(node.value) if node.written is None else node.written or "~")
    if isinstance(node, Lookup):
        if node.is_expression:
            return _shortened(f"{describe(node)} {scalar_text(node.text)}")
        return f"{describe(node)} {node.text}" + (f" (default {value_text(node.default)})" if node.default else "")
    if isinstance(node, Container):
        return _container(node)
    return describe(node) + (f"@{node.name}" if node.name else "")


def _container(node: Container) -> str:
    name = f":@{node.name}" if node.name else ""
    tag = "" if node.is_plain and not name else f"!{node.kind}{name} "
    items, marks = list(children(node)), "[]" if isinstance(node, Sequence) else "{}"
    if len(items) <= _WIDTH // 3 and all(isinstance(item, Scalar) for _, item in items):
        keys = [f"{key_text(step.name)}: " if isinstance(step, Key) else "" for step, _ in items]
        parts = [key + value_text(item) for key, (_, item) in zip(keys, items, strict=True)]
        text = f"{tag}{marks[0]}{', '.join(parts)}{marks[1]}"
        if len(text) <= _WIDTH:
            return text
    return f"{tag}{marks[0]}...{marks[1]} ({len(items)})"


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
