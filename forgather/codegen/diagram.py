"""A graph folded into boxes with rows: what any picture of it is made of.

Takes a graph, gives boxes: the config itself first, then one for each call and container. Keeps true: a node that is
reached many times is one box; plain values, variables and short plain lists are rows of the box they stand in; nothing
is imported or built, and `!env` stays symbolic.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from forgather.config.graph import (
    Call,
    Container,
    ContainerKind,
    Entry,
    Graph,
    Lookup,
    Mapped,
    Node,
    Scalar,
    describe,
    is_leaf,
    word_of,
)
from forgather.config.path import GraphPath, Index, Key, format_path
from forgather.config.traverse import Step, children, edges, roots, shared_nodes
from forgather.config.yaml.scalar_text import key_text, scalar_text

CONFIG = "config"
_INLINE = 44
_LONGEST = 20_000


@dataclass(slots=True)
class Row:
    """One value of a box.

    Args:
        step: how the value is reached from its box.
        node: the value.
        entry: the key that holds it; None for items and positional arguments.
        box: position of the value's own box; None for a value that is shown in the row.
        rows: values inside a short plain list or mapping, and the default of a variable.
    """

    step: Step
    node: Node
    entry: Entry | None = None
    box: int | None = None
    rows: tuple[Row, ...] = ()


@dataclass(slots=True)
class Box:
    """A call, a container, or the config itself.

    Args:
        node: what the box shows; None for the config.
        path: the shortest path that reaches it.
        rows: its values.
    """

    node: Node | None
    path: GraphPath = ()
    rows: list[Row] = field(default_factory=list)


def fold(graph: Graph) -> list[Box]:
    """Returns the boxes of a graph, those nearest to the config first; box 0 is the config."""
    tops = roots(graph)
    shared = shared_nodes([node for _, node in tops])
    boxes = [Box(None)]
    places: dict[int, int] = {}
    # A list that grows while it is read: breadth first, and no recursion.
    for box in boxes:
        for step, node, entry in _top_edges(graph) if box.node is None else edges(box.node):
            if (inner := _inline(node, shared)) is not None:
                box.rows.append(Row(step, node, entry, rows=inner))
                continue
            if id(node) not in places:
                places[id(node)] = len(boxes)
                boxes.append(Box(node, (*box.path, step)))
            box.rows.append(Row(step, node, entry, box=places[id(node)]))
    return boxes


def _top_edges(graph: Graph) -> list[tuple[Step, Node, Entry | None]]:
    return [(Key(entry.key), entry.value, entry) for entry in (*graph.targets.values(), *graph.definitions)]


def _inline(node: Node, shared: set[int]) -> tuple[Row, ...] | None:
    """Returns the rows inside a value that needs no box; None for one that does."""
    if isinstance(node, Call) or (isinstance(node, Container) and (node.tagged or id(node) in shared)):
        return None
    if isinstance(node, Container) and len(flow_text(node, _INLINE + 1)) > _INLINE:
        return None
    found = [Row(step, child, entry) for step, child, entry in edges(node)]
    return tuple(found) if all(is_leaf(row.node) for row in found) else None


def kind(node: Node | None) -> str:
    """Returns what a node is, in one word: `singleton`, `list`, `var`, `str`, ..."""
    if node is None:
        return CONFIG
    if isinstance(node, Scalar):
        return "null" if node.value is None else type(node.value).__name__
    return word_of(node)


def is_number(node: Node) -> bool:
    """Returns whether a node is a number."""
    return isinstance(node, Scalar) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)


def is_plain(node: Node) -> bool:
    """Returns whether a node is a sequence or mapping without a tag, which begins where its first value stands."""
    return isinstance(node, Container) and not node.tagged


def title(node: Node) -> str:
    """Returns the short name of what stands in a box: the symbol of a call, the kind of a container."""
    if isinstance(node, Call):
        return node.constructor.rpartition(":")[2] or node.constructor
    return f"!{kind(node)}" if kind(node) in (ContainerKind.TUPLE, ContainerKind.DLIST) else kind(node)


def heading(box: Box, name: str) -> str:
    """Returns what a box goes by: a call by its symbol, a container by its name or the key that leads to it."""
    if isinstance(box.node, Call):
        return title(box.node)
    return name or (label(box.path[-1]) if box.path else CONFIG)


def constructor(node: Node | None) -> str | None:
    """Returns the whole constructor of a call; None for other nodes."""
    return node.constructor if isinstance(node, Call) else None


def own_name(node: Node | None) -> str | None:
    """Returns the `@name` of a node."""
    return node.name if node is not None else None


def step_text(step: Step) -> str:
    """Returns a step as it stands in a path: `.lr`, `[0]`, `['in.proj']`."""
    path: GraphPath = (step,)
    text = format_path(path)
    return text if text.startswith("[") else f".{text}"


def label(step: Step) -> str:
    """Returns a step as it stands in front of a value: `lr`, `[0]`."""
    if isinstance(step, Index):
        return f"[{step.position}]"
    return step.name if isinstance(step.name, str) else key_text(step.name)


def flow_text(node: Node, limit: int = _LONGEST) -> str:
    """Returns a value on one line, as YAML would have it, calls without their arguments; cut at `limit`.

    Numbers stay as they were written (`1e-2`, `0o17`).
    """
    if isinstance(node, Scalar):
        return _cut(node.written if is_number(node) and node.written else scalar_text(node.value), limit)
    if isinstance(node, Lookup):
        return _cut(f"{describe(node)} {node.text}", limit)
    if isinstance(node, Call):
        return _cut(describe(node), limit)
    parts: list[str] = []
    room = limit
    for step, child in children(node):
        text = flow_text(child, limit)
        parts.append(f"{label(step)}: {text}" if isinstance(step, Key) else text)
        room -= len(parts[-1]) + 2
        if room < 0:
            break
    open_, close = "{}" if isinstance(node, Mapped) else "[]"
    return _cut(f"{open_}{', '.join(parts)}{close}", limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: max(limit - 1, 0)]}…"


# Characters that steer, hide or turn the reading direction, and those that XML has no way to write.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufffe\uffff]")


def uses(boxes: Iterable[Box]) -> Counter[int]:
    """Returns at how many places other boxes use each box; being named by the config is no use."""
    return Counter(row.box for box in boxes if box.node is not None for row in box.rows if row.box is not None)


def cut(text: str, width: int) -> str:
    """Returns the text, or its beginning and an ellipsis.

    Example:
        >>> cut("forgather", 5)
        'forg…'
    """
    return text if len(text) <= width else f"{text[: width - 1]}…"


def visible(text: str) -> str:
    """Returns the text with characters that cannot be seen, or that act on others, as escapes."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
