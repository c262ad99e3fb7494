"""A graph as boxes with rows, the common intermediate form of all diagrams.

The input is a graph; the output is a list of boxes: the config first, then one box for each call and container. A node
that is used several times has one box. Plain values, variables and short plain lists are rows of the box that contains
them. Nothing is imported or constructed, and the value of an `!env` is not read.
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
    """One value in a box.

    Args:
        step: the last step of the value's path.
        node: the node of the value.
        entry: the mapping entry of the value; None for list items and positional arguments.
        box: the index of the value's own box; None if the value is shown in the row.
        rows: the values inside a short plain list or mapping, or the default of a variable.
    """

    step: Step
    node: Node
    entry: Entry | None = None
    box: int | None = None
    rows: tuple[Row, ...] = ()


@dataclass(slots=True)
class Box:
    """The box of a call, of a container, or of the config itself.

    Args:
        node: the call or container; None for the config.
        path: the shortest path to the node.
        rows: the values in the box.
    """

    node: Node | None
    path: GraphPath = ()
    rows: list[Row] = field(default_factory=list)


def boxes_of(graph: Graph) -> list[Box]:
    """Returns the boxes of a graph, in the order of their distance from the config; box 0 is the config."""
    tops = roots(graph)
    shared = shared_nodes([node for _, node in tops])
    boxes = [Box(None)]
    places: dict[int, int] = {}
    # The list grows during the iteration: this is a breadth-first search, without recursion for deep graphs.
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
    """Returns the rows inside a value that is shown in a row; None for a value that gets its own box."""
    if isinstance(node, Call) or (isinstance(node, Container) and (node.tagged or id(node) in shared)):
        return None
    if isinstance(node, Container) and len(flow_text(node, _INLINE + 1)) > _INLINE:
        return None
    # Only one level is shown in a row: a container inside a container gets its own box.
    found = [Row(step, child, entry) for step, child, entry in edges(node)]
    return tuple(found) if all(is_leaf(row.node) for row in found) else None


def kind(node: Node | None) -> str:
    """Returns the kind of a node as one word: `singleton`, `list`, `var`, `str`, ..."""
    if node is None:
        return CONFIG
    if isinstance(node, Scalar):
        return "null" if node.value is None else type(node.value).__name__
    return word_of(node)


def is_number(node: Node) -> bool:
    """Returns whether a node is a number."""
    return isinstance(node, Scalar) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)


def is_plain(node: Node) -> bool:
    """Returns whether a node is a sequence or mapping without a tag.

    The origin of such a node is the origin of its first value.
    """
    return isinstance(node, Container) and not node.tagged


def title(node: Node) -> str:
    """Returns the title of a node's box: the symbol of a call, or the kind of a container."""
    if isinstance(node, Call):
        return node.constructor.rpartition(":")[2] or node.constructor
    return f"!{kind(node)}" if kind(node) in (ContainerKind.TUPLE, ContainerKind.DLIST) else kind(node)


def heading(box: Box, name: str) -> str:
    """Returns the heading of a box: the symbol of a call, the name of a container, or the last step of the box's path.

    Args:
        box: the box.
        name: the anchor or `@name` of the box's node; "" if the node has neither.
    """
    if isinstance(box.node, Call):
        return title(box.node)
    return name or (label(box.path[-1]) if box.path else CONFIG)


def constructor(node: Node | None) -> str | None:
    """Returns the constructor of a call; None if the node is not a call."""
    return node.constructor if isinstance(node, Call) else None


def step_text(step: Step) -> str:
    """Returns the text of a path step, as part of a path: `.lr`, `[0]`, `['in.proj']`."""
    path: GraphPath = (step,)
    text = format_path(path)
    return text if text.startswith("[") else f".{text}"


def label(step: Step) -> str:
    """Returns the text of a path step, as the label of a value: `lr`, `[0]`."""
    if isinstance(step, Index):
        return f"[{step.position}]"
    return step.name if isinstance(step.name, str) else key_text(step.name)


def flow_text(node: Node, limit: int = _LONGEST) -> str:
    """Returns a value on one line in YAML's flow style; calls are shown without their arguments.

    Numbers are shown as the user wrote them (`1e-2`, `0o17`).

    Args:
        node: the node of the value.
        limit: the number of characters after which the text is cut.
    """
    if isinstance(node, Scalar):
        return cut(node.written if is_number(node) and node.written else scalar_text(node.value), limit)
    if isinstance(node, Lookup):
        return cut(f"{describe(node)} {node.text}", limit)
    if isinstance(node, Call):
        return cut(describe(node), limit)
    parts: list[str] = []
    room = limit
    for step, child in children(node):
        text = flow_text(child, limit)
        parts.append(f"{label(step)}: {text}" if isinstance(step, Key) else text)
        # A container can be very long, and the rest would be cut anyway.
        room -= len(parts[-1]) + 2
        if room < 0:
            break
    open_, close = "{}" if isinstance(node, Mapped) else "[]"
    return cut(f"{open_}{', '.join(parts)}{close}", limit)


# Control characters, invisible characters, changes of the reading direction, and characters that XML cannot contain.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufffe\uffff]")


def use_counts(boxes: Iterable[Box]) -> Counter[int]:
    """Returns the number of rows in other boxes that refer to each box, by the index of the box.

    Rows of the config itself are not counted.
    """
    # The config is not drawn, so its rows have no arrows.
    return Counter(row.box for box in boxes if box.node is not None for row in box.rows if row.box is not None)


def cut(text: str, width: int) -> str:
    """Returns the text; a text longer than `width` characters is cut and ends in an ellipsis.

    Example:
        >>> cut("forgather", 5)
        'forg…'
    """
    return text if len(text) <= width else f"{text[: width - 1]}…"


def visible(text: str) -> str:
    """Returns the text with escapes for invisible characters and for characters that change the reading direction."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
