"""Shows a graph as a text tree or as JSON.

The input is a graph; the output is text or plain data. Invariants: nothing is imported or built; `!env` stays symbolic;
a shared node is written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Names
from typing import Any

from forgather.config.anchor_names import anchor_names
from forgather.config.graph import (
    SPREAD,
    Call,
    Container,
    Graph,
    Lookup,
    Mapped,
    Node,
    Scalar,
    Sequence,
    describe,
    word_of,
)
from forgather.config.path import GraphPath, Index, Key, format_path
from forgather.config.traverse import Step, children, entries, shared_nodes

_WIDTH = 80


def tree(graph: Graph, targets: Names[str] | None = None, *, width: int = 0) -> str:
    """Returns the targets as a text tree; `&name` marks a shared value, `*name` its further occurrences.

    Args:
        graph: the config.
        targets: the names of the targets to show; None to show all.
        width: the number of columns that a line may have; a longer value is cut, but not below 80 characters.

    Raises:
        UnknownTargetError: FG302 if the graph does not have a target of that name.
    """
    tops = [((Key(name),), graph.target(name).value) for name in (graph.targets if targets is None else targets)]
    drawing = _Drawing(anchor_names(graph, tops), width)
    return "".join(f"{line}\n" for path, node in tops for line in drawing.lines(path[-1], node, "", ""))


def to_json(graph: Graph, *, label: Callable[[str], str] = str, config: str | None = None) -> dict[str, Any]:
    """Returns the graph as plain data, in the JSON form of the language.

    Args:
        graph: the config.
        label: a function that shortens the absolute path of a file.
        config: the name of the config.
    """
    writer = _JsonWriter(graph, label)
    return {"config": config, "targets": {name: writer.value(entry.value) for name, entry in graph.targets.items()}}


def value_facts(node: Node) -> Any:
    """Returns a plain value as itself, and any other value as a description of its kind.

    Example:
        >>> from forgather.config.graph import ContainerKind
        >>> value_facts(Sequence(kind=ContainerKind.LIST, items=(Scalar(value=0.9), Scalar(value="a"))))
        [0.9, 'a']
    """
    if isinstance(node, Scalar):
        return _plain(node.value)
    if isinstance(node, Call):
        return {"kind": str(node.kind), "constructor": node.constructor}
    if isinstance(node, Lookup):
        return {"kind": node.tag, **_looked_up(node)}
    held = [child for _, child in children(node)]
    if isinstance(node, Container) and node.is_plain and all(isinstance(child, Scalar) for child in held):
        return _JsonWriter(Graph(targets={}), str).value(node)
    return {"kind": word_of(node), "size": len(held)}


def _looked_up(node: Lookup) -> dict[str, str]:
    return {"expression" if node.is_expression else "name": node.text}


class _Drawing:
    def __init__(self, anchors: dict[int, str], width: int) -> None:
        self._anchors = anchors
        self._width = width
        self._drawn: set[int] = set()

    def lines(self, step: Step, node: Node, first: str, rest: str) -> Iterator[str]:
        label = _label(step)
        anchor = self._anchors.get(id(node))
        # A node without an anchor name has one parent, or is a plain scalar, which is shown again.
        if anchor and id(node) in self._drawn:
            yield f"{first}{label}: *{anchor}"
            return
        self._drawn.add(id(node))
        start = f"{first}{label}: {f'&{anchor} ' if anchor else ''}"
        yield f"{start}{_headline(node, max(self._width - len(start), _WIDTH))}"
        members = list(children(node))
        for number, (inner, child) in enumerate(members, start=1):
            last = number == len(members)
            yield from self.lines(inner, child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))


def _label(step: Step) -> str:
    path: GraphPath = (step,)
    return f"[{step.position}]" if isinstance(step, Index) else format_path(path)


def _headline(node: Node, width: int) -> str:
    if isinstance(node, Scalar):
        text = repr(node.value)
        return text if len(text) <= width else f"{text[: width - 3]}..."
    if isinstance(node, Lookup):
        return f"{describe(node)} {repr(node.text) if node.is_expression else node.text}"
    name = f"@{node.name}" if node.name else ""
    if isinstance(node, Container):
        return f"{'!' if node.tagged else ''}{node.kind}{':' if name else ''}{name} ({len(list(children(node)))})"
    return f"{describe(node)}{name}"


class _JsonWriter:
    """A writer of the JSON form; it writes each node once, and `{"ref": id}` at further occurrences."""

    def __init__(self, graph: Graph, label: Callable[[str], str]) -> None:
        self._label = label
        self._shared = shared_nodes([entry.value for entry in graph.targets.values()])
        self._ids: dict[int, int] = {}

    def value(self, node: Node) -> Any:
        if isinstance(node, Scalar):
            return _plain(node.value)
        if id(node) in self._ids:
            return {"ref": self._ids[id(node)]}
        if isinstance(node, Sequence) and not self._is_node(node):
            return [self.value(item) for item in node.items]
        if isinstance(node, Mapped) and not self._is_node(node):
            return {entry.key: self.value(entry.value) for entry in node.entries}
        # Before the children, so that ids are in the order of the document.
        self._ids[id(node)] = len(self._ids) + 1
        fields: dict[str, Any] = {"kind": word_of(node), "id": self._ids[id(node)], **self._fields(node)}
        if node.span is not None:
            fields["span"] = {"file": self._label(node.span.file), "line": node.span.line}
        return fields

    def _is_node(self, node: Container) -> bool:
        if not node.is_plain or id(node) in self._shared:
            return True
        # A JSON object has only string keys, and a mapping with a key `kind` or `ref` would read as a node or a
        # reference.
        return any(not isinstance(entry.key, str) or entry.key in ("kind", "ref") for entry in entries(node))

    def _fields(self, node: Node) -> dict[str, Any]:
        if isinstance(node, Call):
            return self._call(node)
        if isinstance(node, Lookup):
            default = {} if node.default is None else {"default": self.value(node.default)}
            return {**_looked_up(node), **default}
        fields: dict[str, Any] = {"name": node.name} if node.name else {}
        if isinstance(node, Container) and not node.tagged:
            # A plain container has a node of its own only because it is shared or has unusual keys.
            fields["tag"] = False
        held = [(step, self.value(child)) for step, child in children(node)]
        items = [[_key(step.name), value] if isinstance(step, Key) else value for step, value in held]
        return {**fields, "items": items}

    def _call(self, node: Call) -> dict[str, Any]:
        fields: dict[str, Any] = {"constructor": node.constructor}
        if node.name:
            fields["name"] = node.name
        if node.args:
            fields["args"] = [self.value(value) for value in node.args]
        for name, given in (("kwargs", node.kwargs), (SPREAD, node.named_latent_args)):
            if given:
                fields[name] = {entry.key: self.value(entry.value) for entry in given}
        if node.spread is not None:
            fields[SPREAD] = self.value(node.spread)
        if node.submodule_searchpath is not None:
            fields["submodule_searchpath"] = self.value(node.submodule_searchpath)
        return fields


def _plain(value: Any) -> Any:
    # JSON has no infinity and no nan.
    if isinstance(value, float) and not math.isfinite(value):
        return {"kind": "scalar", "yaml": ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"}
    return value


def _key(key: Any) -> Any:
    if isinstance(key, tuple):
        return {"kind": "tuple", "items": [_plain(part) for part in key]}
    return _plain(key)
