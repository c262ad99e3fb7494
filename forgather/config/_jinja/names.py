"""What expressions of a template read, and what loops bind.

Takes Jinja's nodes, gives plain tables that compiled code can hold. Keeps true: tables depend on the text of the
template alone.
"""

from __future__ import annotations

from jinja2 import nodes

Names = tuple[str, ...]
Fields = tuple[tuple[str, str], ...]
Bound = tuple[str, Names, Fields]

_HIDDEN = frozenset({"super", "self", "loop", "caller"})
_FOLLOWED = 64


def names_in(node: nodes.Node) -> tuple[Names, Fields]:
    """Returns the names that an expression reads, and the attributes it reads of names."""
    found = [node, *node.find_all((nodes.Name, nodes.Getattr))]
    names = [item.name for item in found if isinstance(item, nodes.Name) and item.ctx == "load"]
    fields = [
        (item.node.name, item.attr)
        for item in found
        if isinstance(item, nodes.Getattr) and isinstance(item.node, nodes.Name)
    ]
    return (
        tuple(dict.fromkeys(name for name in names if name not in _HIDDEN)),
        tuple(dict.fromkeys(pair for pair in fields if pair[0] not in _HIDDEN)),
    )


def bound_by(target: nodes.Node) -> Names:
    """Returns the names that an assignment to `target` binds."""
    return tuple(item.name for item in [target, *target.find_all(nodes.Name)] if isinstance(item, nodes.Name))


def turns_of(node: nodes.For) -> tuple[tuple[Bound, ...], ...]:
    """Returns what each name of a loop reads: one row for each turn over a literal list, else one row for all turns."""
    names, fields = names_in(node.iter)
    targets = bound_by(node.target)
    whole = (tuple((target, names, fields) for target in targets),)
    literal = isinstance(node.iter, nodes.List | nodes.Tuple) and node.test is None and not node.recursive
    if not literal or not names or len(node.iter.items) > _FOLLOWED:  # type: ignore[attr-defined]
        return whole
    return tuple(_row(node.target, item) for item in node.iter.items)  # type: ignore[attr-defined]


def _row(target: nodes.Node, item: nodes.Expr) -> tuple[Bound, ...]:
    if isinstance(target, nodes.Tuple) and isinstance(item, nodes.Tuple | nodes.List):
        if len(target.items) == len(item.items):
            return tuple(bound for pair in zip(target.items, item.items, strict=True) for bound in _row(*pair))
    return tuple((name, *names_in(item)) for name in bound_by(target))


def finds(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    """Returns whether a node is, or holds, one of the kinds."""
    return isinstance(node, kinds) or next(node.find_all(kinds), None) is not None


def count_nodes(body: list[nodes.Node]) -> int:
    """Returns how many nodes a body is made of."""
    return sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)
