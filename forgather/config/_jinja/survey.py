"""What a template reads and sets, name by name, without running it.

Takes the tree of a template, gives tables of plain constants that its code carries. Keeps true: whatever may read a
name counts as a read of it, so that a name which is in no table is read by nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from jinja2 import nodes

# What is set inside one of these is forgotten at its end.
_SCOPES = (
    nodes.Block,
    nodes.For,
    nodes.Macro,
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.With,
    nodes.AssignBlock,
)
HIDDEN = frozenset({"super", "self", "loop", "caller"})
_SCOPE_WORDS = {nodes.Block: "block", nodes.For: "loop", nodes.Macro: "macro"}

Tables = dict[str, tuple[object, ...]]


def survey(tree: nodes.Template) -> Tables:
    """Returns the tables of a template.

    Returns:
        fg_fields: pairs of a name and an attribute that is read of it; "" for what is no name.
        fg_whole: names that are handed on whole, so that anything may read their attributes.
        fg_written: names that are set, and attributes that are.
        fg_sets: name, line, kind and name of the scope that forgets it, and whether the template reads the name
            elsewhere, for each `set` of a name that nothing in the template can read. The kind is "" where other
            templates see the name.
        fg_set_fields: name, attribute and line of each `set` of an attribute that nothing in the template reads.
    """
    reads, whole = _reads(tree), dict.fromkeys(_whole(tree))
    fields = dict.fromkeys(_fields(tree))
    known = {field for _, field in fields}
    set_fields = [(ref.name, ref.attr, ref.lineno) for ref in tree.find_all(nodes.NSRef)]
    sets = list(_sets(tree, None))
    return {
        "fg_fields": tuple(fields),
        "fg_whole": tuple(whole),
        "fg_written": tuple(dict.fromkeys([*(item[0] for item in sets), *(item[1] for item in set_fields)])),
        "fg_sets": tuple((*item, item[0] in reads) for item in sets if item[2] or item[0] not in reads),
        "fg_set_fields": tuple(item for item in set_fields if item[1] not in known and item[0] not in whole),
    }


def _reads(node: nodes.Node) -> set[str]:
    names = {item.name for item in node.find_all(nodes.Name) if item.ctx == "load" and item.name not in HIDDEN}
    return names | {item.name for item in node.find_all(nodes.NSRef)}


def _fields(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    for imported in tree.find_all(nodes.FromImport):
        yield from (("", name if isinstance(name, str) else name[0]) for name in imported.names)
    for item in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Filter)):
        base = getattr(item, "node", None)
        name = base.name if isinstance(base, nodes.Name) else ""
        if isinstance(item, nodes.Getattr):
            yield name, item.attr
        elif isinstance(item, nodes.Getitem) and _text(item.arg) is not None:
            yield name, _text(item.arg) or ""
        elif isinstance(item, nodes.Filter):
            yield from (("", text) for text in map(_text, item.args) if text is not None and item.name != "default")


def _text(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _whole(node: nodes.Node) -> Iterator[str]:
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Name):
            if child.ctx == "load" and not _reads_part(node):
                yield child.name
        elif isinstance(child, nodes.Assign) and isinstance(child.target, nodes.Name):
            # `set ns = ns | default(namespace())` hands it to itself.
            yield from (name for name in _whole(child) if name != child.target.name)
        else:
            yield from _whole(child)


def _reads_part(around: nodes.Node) -> bool:
    """Says whether what stands around a name reads a part of it, or nothing but whether it is there."""
    if isinstance(around, nodes.Test):
        return around.name in ("defined", "undefined")
    return isinstance(around, nodes.Getattr) or (isinstance(around, nodes.Getitem) and _text(around.arg) is not None)


class _Scope:
    """A part of a template that forgets at its end what is set inside; each question is answered once."""

    def __init__(self, node: nodes.Node) -> None:
        self._node = node

    @cached_property
    def reads(self) -> set[str]:
        """Names that it reads."""
        return _reads(self._node)

    @cached_property
    def shows(self) -> bool:
        """Whether other templates see its names."""
        seen_by = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Block)
        return next(self._node.find_all(seen_by), None) is not None

    @property
    def kind(self) -> tuple[str, str]:
        """What it is, and its name."""
        word = next((word for kind, word in _SCOPE_WORDS.items() if isinstance(self._node, kind)), "statement")
        return word, getattr(self._node, "name", "")


def _sets(node: nodes.Node, scope: _Scope | None) -> Iterator[tuple[str, int, str, str]]:
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Assign | nodes.AssignBlock) and isinstance(child.target, nodes.Name):
            name = child.target.name
            if scope is None or scope.shows:
                kind: tuple[str, str] | None = ("", "")
            else:
                kind = None if name in scope.reads else scope.kind
            if kind and not name.startswith("_") and not _acts(child):
                yield name, child.lineno, *kind
        yield from _sets(child, _Scope(child) if isinstance(child, _SCOPES) else scope)


def _acts(node: nodes.Node) -> bool:
    """Says whether computing a value does more than that: `set x = super()` runs the `set`s of the parent."""
    for call in node.find_all(nodes.Call):
        base = call.node.node if isinstance(call.node, nodes.Getattr) else call.node
        if isinstance(base, nodes.Name) and base.name in ("super", "self", "caller"):
            return True
    return False
