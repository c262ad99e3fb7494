"""Traversal of graphs: the only module that knows the children of each kind of node.

The functions return the children of a node, visit all nodes of a graph, rebuild nodes with other children, and find
shared nodes. A child comes with the step that leads to it: a `Key` or an `Index`. Invariants: `walk` visits each node
once and does not recurse; `rebuild` keeps shared nodes shared if the function `change`, which replaces children,
returns the same new node whenever it gets the same old node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

from forgather.config.graph import (
    Call,
    CallKind,
    Container,
    ContainerKind,
    Entry,
    Graph,
    Lookup,
    Mapped,
    Node,
    Scalar,
    Sequence,
    is_null,
)
from forgather.config.path import GraphPath, Index, Key

Step = Key | Index
Moved = Callable[[Entry, Node], Entry]
SEARCH_PATH = "submodule_searchpath"


def children(node: Node) -> Iterator[tuple[Step, Node]]:
    """Yields the direct children of a node, each with the step that leads to it."""
    for step, child, _ in edges(node):
        yield step, child


def edges(node: Node) -> Iterator[tuple[Step, Node, Entry | None]]:
    """Yields the direct children of a node, each as a tuple of step, child and entry.

    The entry of an item or a positional argument is the one in `marks`. It is None if there is no such entry.
    """
    if isinstance(node, Call):
        marks = {mark.key: mark for mark in node.marks}
        for position, value in enumerate(node.args):
            yield Index(position), value, marks.get(position)
        # A keyword may be in both; the paths are equal then, and the latent one overrides at construction.
        for entry in (*node.kwargs, *node.latent_args):
            yield Key(entry.key), entry.value, entry
        if node.submodule_searchpath is not None:
            yield Key(SEARCH_PATH), node.submodule_searchpath, marks.get(SEARCH_PATH)
    elif isinstance(node, Sequence):
        marks = {mark.key: mark for mark in node.marks}
        for position, value in enumerate(node.items):
            yield Index(position), value, marks.get(position)
    elif isinstance(node, Mapped):
        for entry in node.entries:
            yield Key(entry.key), entry.value, entry
    elif isinstance(node, Lookup) and node.default is not None:
        yield Key("default"), node.default, None


def entries(node: Node) -> tuple[Entry, ...]:
    """Returns the keyword arguments of a call or the entries of a mapping; an empty tuple for other nodes."""
    if isinstance(node, Call):
        return (*node.kwargs, *node.latent_args)
    return node.entries if isinstance(node, Mapped) else ()


def members(node: Container) -> list[tuple[Step, Node]]:
    """Returns the children of a container, each with its step, without the null items that a `!dlist` drops."""
    found = children(node)
    return [(step, child) for step, child in found if not (node.kind is ContainerKind.DLIST and is_null(child))]


def with_value(entry: Entry, value: Node) -> Entry:
    """Returns a copy of `entry` with another value."""
    return replace(entry, value=value)


def rebuild(node: Node, change: Callable[[Node], Node], moved: Moved = with_value) -> Node:
    """Returns `node` with `change` applied to each direct child; `node` itself if no child changed.

    Args:
        node: the node.
        change: a function that returns the new child for a child.
        moved: a function that returns the new entry for an entry and its new value.
    """
    if isinstance(node, Call):
        args, kwargs = _values(node.args, change), _entries(node.kwargs, change, moved)
        latent = _entries(node.latent_args, change, moved)
        # None stays None.
        search = node.submodule_searchpath and change(node.submodule_searchpath)
        # Identity tells callers that nothing changed, and keeps shared nodes shared.
        same = (
            args is node.args
            and kwargs is node.kwargs
            and latent is node.latent_args
            and search is node.submodule_searchpath
        )
        if same:
            return node
        marks = _entries(node.marks, change, moved)
        return replace(node, args=args, kwargs=kwargs, latent_args=latent, submodule_searchpath=search, marks=marks)
    if isinstance(node, Sequence):
        items = _values(node.items, change)
        return node if items is node.items else replace(node, items=items, marks=_entries(node.marks, change, moved))
    if isinstance(node, Mapped):
        changed = _entries(node.entries, change, moved)
        return node if changed is node.entries else replace(node, entries=changed)
    if isinstance(node, Lookup) and node.default is not None:
        default = change(node.default)
        return node if default is node.default else replace(node, default=default)
    return node


def replace_nodes(graph: Graph, replaced: Callable[[Node], Node]) -> Graph:
    """Returns a graph in which each node is replaced; a node that is used several times stays one node.

    Args:
        graph: the graph.
        replaced: a function that returns the replacement of a node, or the node itself. The children of the result are
            replaced in turn.
    """
    made: dict[int, Node] = {}

    def change(node: Node) -> Node:
        if id(node) not in made:
            made[id(node)] = rebuild(replaced(node), change)
        return made[id(node)]

    return replace(
        graph,
        targets={name: with_value(entry, change(entry.value)) for name, entry in graph.targets.items()},
        definitions=tuple(with_value(entry, change(entry.value)) for entry in graph.definitions),
        anchors={id(made[key]): name for key, name in graph.anchors.items() if key in made},
    )


def _values(values: tuple[Node, ...], change: Callable[[Node], Node]) -> tuple[Node, ...]:
    changed = tuple(change(value) for value in values)
    return values if all(a is b for a, b in zip(values, changed, strict=True)) else changed


def _entries(entries: tuple[Entry, ...], change: Callable[[Node], Node], moved: Moved) -> tuple[Entry, ...]:
    values = tuple(change(entry.value) for entry in entries)
    if all(entry.value is value for entry, value in zip(entries, values, strict=True)):
        return entries
    return tuple(
        entry if entry.value is value else moved(entry, value) for entry, value in zip(entries, values, strict=True)
    )


def walk(roots: Iterable[tuple[GraphPath, Node]], *, unbuilt: bool = True) -> Iterator[tuple[GraphPath, Node]]:
    """Yields every node once, parents before children, with the first path that reaches it.

    Args:
        roots: the paths and nodes to begin with.
        unbuilt: whether to visit the arguments of `!meta`, which are passed to the constructor as nodes.
    """
    seen: set[int] = set()
    # An own stack: a graph may be deeper than Python's recursion limit.
    stack = [(path, node) for path, node in roots][::-1]
    while stack:
        path, node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        # A shortcut for speed: most nodes are plain values without children.
        if isinstance(node, Scalar) or (isinstance(node, Sequence) and not node.items):
            continue
        # What a `!meta` gets is not built by the construction, so checks of built nodes skip it.
        if unbuilt or not (isinstance(node, Call) and node.kind is CallKind.META):
            stack.extend([((*path, step), child) for step, child in children(node)][::-1])


def roots(graph: Graph) -> list[tuple[GraphPath, Node]]:
    """Returns the targets of a graph, then its definitions, as paths and nodes for `walk`."""
    entries = (*graph.targets.values(), *graph.definitions)
    return [((Key(entry.key),), entry.value) for entry in entries]


_walked: WeakKeyDictionary[Graph, tuple[tuple[GraphPath, Node], ...]] = WeakKeyDictionary()


def all_nodes(graph: Graph) -> tuple[tuple[GraphPath, Node], ...]:
    """Returns every node of a graph once, parents before children, with the first path that reaches it."""
    found = _walked.get(graph)
    if found is None:
        # A dozen checks walk the same graph, and a graph never changes.
        found = _walked[graph] = tuple(walk(roots(graph)))
    return found


def shared_nodes(nodes: Iterable[Node]) -> set[int]:
    """Returns the ids of the nodes that occur more than once, as one of `nodes` or as a child of a node inside them."""
    nodes = list(nodes)
    count = Counter(id(node) for node in nodes)
    for _, node in walk([((), node) for node in nodes]):
        count.update(id(child) for _, child in children(node))
    # `walk` visits a node once, but all edges of each node are counted.
    return {key for key, edges in count.items() if edges > 1}


def paths_to(tops: Iterable[tuple[GraphPath, Node]], wanted: set[int], *, limit: int) -> list[tuple[GraphPath, Node]]:
    """Returns the paths to wanted nodes, each with its node; paths through a wanted node to another one are left out.

    Args:
        tops: the paths and nodes to begin with.
        wanted: the ids of the wanted nodes.
        limit: the largest number of paths to return.
    """
    tops = list(tops)
    # Without this, a search for one node would walk every path of a graph, which can be exponentially many.
    leads = _leading(tops, wanted)
    found: list[tuple[GraphPath, Node]] = []
    stack = tops[::-1]
    while stack and len(found) < limit:
        path, node = stack.pop()
        if id(node) in wanted:
            found.append((path, node))
        elif id(node) in leads:
            stack.extend([((*path, step), child) for step, child in children(node)][::-1])
    return found


def _leading(tops: Iterable[tuple[GraphPath, Node]], wanted: set[int]) -> set[int]:
    """Returns the ids of the nodes that contain a wanted node, directly or not."""
    parents: dict[int, list[int]] = {}
    for _, node in walk(tops):
        for _, child in children(node):
            parents.setdefault(id(child), []).append(id(node))
    leads: set[int] = set()
    todo = list(wanted)
    while todo:
        for parent in parents.get(todo.pop(), ()):
            if parent not in leads:
                leads.add(parent)
                todo.append(parent)
    return leads


def written_nodes(graph: Graph) -> set[int]:
    """Returns the ids of the nodes that are written at a path, not those reached only through aliases or merge keys."""
    entries = (*graph.targets.values(), *graph.definitions)
    found = {id(entry.value) for entry in entries if entry.alias is None}
    for _, node in all_nodes(graph):
        found.update(id(child) for _, child, entry in edges(node) if entry is None or entry.alias is None)
    return found


def walk_places(graph: Graph) -> Iterator[tuple[GraphPath, Node]]:
    """Yields every path of the graph with its node.

    The paths inside an aliased node are yielded only below the path of its anchor.
    """
    entries = (*graph.targets.values(), *graph.definitions)
    stack: list[tuple[GraphPath, Node, Entry | None]] = [((Key(entry.key),), entry.value, entry) for entry in entries]
    stack.reverse()
    at_home, opened = written_nodes(graph), set[int]()
    while stack:
        path, node, entry = stack.pop()
        yield path, node
        elsewhere = entry is not None and entry.alias is not None and id(node) in at_home
        if not elsewhere and id(node) not in opened:
            opened.add(id(node))
            stack.extend([((*path, step), child, inner) for step, child, inner in edges(node)][::-1])
