"""Static analysis of a template: the names that it reads, sets and binds, the contents of its blocks, and sizes.

The input is Jinja's nodes; the output is tables of plain constants, which are stored in compiled code. Invariant: the
tables depend only on the text of the template. Nothing is rendered, so a rendered block may have more keys than its
`BlockContents`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from jinja2 import nodes

Names = tuple[str, ...]
Fields = tuple[tuple[str, str], ...]
Bound = tuple[str, Names, Fields]

HIDDEN = frozenset({"super", "self", "loop", "caller"})
"""Names that Jinja defines itself, which nothing in a template sets."""
# Tables are stored in the compiled code; a list of thousands would make them large for no reader's benefit.
_FOLLOWED = 64


def names_in(node: nodes.Node) -> tuple[Names, Fields]:
    """Returns the names that an expression reads, and the attributes that it reads as pairs (name, attribute)."""
    found = [node, *node.find_all((nodes.Name, nodes.Getattr))]
    names = [item.name for item in found if isinstance(item, nodes.Name) and item.ctx == "load"]
    fields = [
        (item.node.name, item.attr)
        for item in found
        if isinstance(item, nodes.Getattr) and isinstance(item.node, nodes.Name)
    ]
    return (
        tuple(dict.fromkeys(name for name in names if name not in HIDDEN)),
        tuple(dict.fromkeys(pair for pair in fields if pair[0] not in HIDDEN)),
    )


def bound_names(target: nodes.Node) -> Names:
    """Returns the names that an assignment to `target` binds."""
    return tuple(item.name for item in [target, *target.find_all(nodes.Name)] if isinstance(item, nodes.Name))


def loop_rows(node: nodes.For) -> tuple[tuple[Bound, ...], ...]:
    """Returns, for each variable of a loop, the names and attributes on which it depends.

    The result has one row for each item if the loop is over a literal list; otherwise it has one row for all items.
    """
    names, fields = names_in(node.iter)
    targets = bound_names(node.target)
    whole = (tuple((target, names, fields) for target in targets),)
    literal = isinstance(node.iter, nodes.List | nodes.Tuple) and node.test is None and not node.recursive
    if not literal or not names or len(node.iter.items) > _FOLLOWED:  # type: ignore[attr-defined]
        return whole
    return tuple(_row(node.target, item) for item in node.iter.items)  # type: ignore[attr-defined]


def _row(target: nodes.Node, item: nodes.Expr) -> tuple[Bound, ...]:
    # `for name, value in [('a', x), ('b', y)]`: each name depends only on its own part.
    if isinstance(target, nodes.Tuple) and isinstance(item, nodes.Tuple | nodes.List):
        if len(target.items) == len(item.items):
            return tuple(bound for pair in zip(target.items, item.items, strict=True) for bound in _row(*pair))
    return tuple((name, *names_in(item)) for name in bound_names(target))


def contains_node(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    """Returns whether a node is of one of the kinds, or contains one."""
    return isinstance(node, kinds) or next(node.find_all(kinds), None) is not None


def count_nodes(body: list[nodes.Node]) -> int:
    """Returns the number of nodes of a body, which determines the cost of one iteration or call of the body."""
    return sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)


# Assignments inside one of these go out of scope at its end.
_SCOPES = (
    nodes.Block,
    nodes.For,
    nodes.Macro,
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.With,
    nodes.AssignBlock,
)
_SCOPE_WORDS = {nodes.Block: "block", nodes.For: "loop", nodes.Macro: "macro"}

Tables = dict[str, tuple[object, ...]]


def name_tables(tree: nodes.Template) -> Tables:
    """Returns the tables of a template, by name.

    Returns:
        fg_fields: the attributes that the template reads, as pairs of the name of the object and the attribute; the
            name is "" if the object is the value of another expression.
        fg_whole: the names whose whole value is used, so that any of its attributes may be read.
        fg_written: the names and the attributes that the template sets.
        fg_sets: a record of each `set` whose value nothing in the template reads: the name, the line, the kind and the
            name of the scope at whose end the value is discarded, and whether the template reads the name elsewhere.
            The kind is "" if other templates can see the name.
        fg_set_fields: the name, the attribute and the line of each `set` of an attribute that the template does not
            read.
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
    # `set ns.x = 1` needs the namespace, so it reads the name.
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
            # `map(attribute='lr')` names an attribute by a string, so any string argument may be one.
            yield from (("", text) for text in map(_text, item.args) if text is not None and item.name != "default")


def _text(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _whole(node: nodes.Node) -> Iterator[str]:
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Name):
            if child.ctx == "load" and not _reads_part(node):
                yield child.name
        elif isinstance(child, nodes.Assign) and isinstance(child.target, nodes.Name):
            # `set ns = ns | default(namespace())` passes the name only to itself.
            yield from (name for name in _whole(child) if name != child.target.name)
        else:
            yield from _whole(child)


def _reads_part(around: nodes.Node) -> bool:
    """Returns whether the node around a name reads only one attribute, or only whether the name is defined."""
    if isinstance(around, nodes.Test):
        return around.name in ("defined", "undefined")
    return isinstance(around, nodes.Getattr) or (isinstance(around, nodes.Getitem) and _text(around.arg) is not None)


class _Scope:
    """A scope of a template: assignments inside it are discarded at its end."""

    def __init__(self, node: nodes.Node) -> None:
        self._node = node

    @cached_property
    def reads(self) -> set[str]:
        """The names that the scope reads."""
        return _reads(self._node)

    @cached_property
    def shows(self) -> bool:
        """Whether other templates can see the names of the scope."""
        seen_by = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Block)
        # An include or import with context, and a block, see the names of the scope around them.
        return next(self._node.find_all(seen_by), None) is not None

    @property
    def kind(self) -> tuple[str, str]:
        """The kind of the scope in words, and the name of the scope."""
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
            # An underscore marks a value that is meant to be unused.
            if kind and not name.startswith("_") and not _acts(child):
                yield name, child.lineno, *kind
        yield from _sets(child, _Scope(child) if isinstance(child, _SCOPES) else scope)


def _acts(node: nodes.Node) -> bool:
    """Returns whether computing a value has effects: `set x = super()` runs the `set`s of the parent's block."""
    for call in node.find_all(nodes.Call):
        base = call.node.node if isinstance(call.node, nodes.Getattr) else call.node
        if isinstance(base, nodes.Name) and base.name in ("super", "self", "caller"):
            return True
    return False


_KEY = re.compile(r"([A-Za-z_][\w.-]*)\s*:(?:\s|$)")


class BlockContents(NamedTuple):
    """The contents of a block, as far as its text shows them.

    Args:
        keys: the keys at the outermost indent of the block.
        opening: the first word of the block's text ("!dlist:@callbacks"); "" if the block has no text.
        calls_super: whether the block prints the block of its parent.
        includes: the names of the templates that the block includes; "" stands for a name that is not a literal.
        sets: the attributes that the block sets, as pairs of name and attribute.
    """

    keys: tuple[str, ...] = ()
    opening: str = ""
    calls_super: bool = False
    includes: tuple[str, ...] = ()
    sets: tuple[tuple[str, str], ...] = ()


def block_contents(tree: nodes.Template) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """Returns the name and the contents of each block of a template, as constants for its compiled code."""
    return tuple((block.name, tuple(_of_block(block))) for block in tree.find_all(nodes.Block))


def template_contents(text: str) -> BlockContents:
    """Returns the contents of a whole template, which are read from its text."""
    lines = [line for line in text.split("\n") if not line.lstrip().startswith(("-- ", "<< ", ">> ", "{%", "=="))]
    return _of_lines(lines)


def _of_block(block: nodes.Block) -> BlockContents:
    found = _of_lines("".join(_texts(block)).split("\n"))
    included = [item.template for item in block.find_all(nodes.Include)]
    return found._replace(
        calls_super=any(isinstance(c.node, nodes.Name) and c.node.name == "super" for c in block.find_all(nodes.Call)),
        includes=tuple(name.value if isinstance(name, nodes.Const) else "" for name in included),
        sets=tuple(dict.fromkeys((ref.name, ref.attr) for ref in block.find_all(nodes.NSRef))),
    )


def _texts(block: nodes.Block) -> Iterator[str]:
    for output in block.find_all(nodes.Output):
        for part in output.nodes:
            # An expression prints a value or a key that is not known before rendering; NUL marks it.
            yield part.data if isinstance(part, nodes.TemplateData) else "\0"


def _of_lines(lines: Iterable[str]) -> BlockContents:
    written = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not written:
        return BlockContents()
    # An expression at the margin, such as `== super()`, prints lines with an indent of their own.
    outermost = min((len(line) - len(line.lstrip()) for line in written if line[0] != "\0"), default=0)
    found = [match[1] for line in written if (match := _KEY.match(line, outermost))]
    return BlockContents(keys=tuple(dict.fromkeys(found)), opening=written[0].split()[0])
