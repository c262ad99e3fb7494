"""Plain data from graph nodes, without constructing anything.

The input is nodes; the output is Python values. Nothing is called, imported or read from the environment: a node that
would require it raises an error with the location of the node.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgather.config.graph import Call, ContainerKind, Entry, Mapped, Node, Scalar, Sequence, describe
from forgather.config.path import PlainScalar
from forgather.errors import ProjectError

_KINDS = {ContainerKind.LIST: list, ContainerKind.TUPLE: tuple}


def plain_value(node: Node, what: str, *, code: str = "FG403") -> object:
    """Returns the value of a node that contains plain data.

    Args:
        node: the node.
        what: the description of the node in the error message, such as "'searchdir' in meta.yaml".
        code: the error code.

    Raises:
        ProjectError: `code` if the node, or a node inside it, is not plain data.
    """
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return _KINDS[node.kind](plain_value(item, what, code=code) for item in node.items)
    if isinstance(node, Mapped):
        pairs = {entry.key: plain_value(entry.value, what, code=code) for entry in node.entries}
        # An entry of a `!dlist` that is null was removed by a child template.
        return [v for v in pairs.values() if v is not None] if node.kind is ContainerKind.DLIST else pairs
    raise ProjectError(
        f"{what} holds {_described(node)}, and may hold plain data only",
        code=code,
        span=node.span,
        hint="write the value itself: it is read without constructing anything",
    )


def plain_entries(node: Node) -> dict[str, PlainScalar]:
    """Returns the plain scalars of a mapping by their string keys; an empty dict for any other node."""
    return {str(entry.key): entry.value.value for entry in string_entries(node) if isinstance(entry.value, Scalar)}


def string_entries(node: Node) -> Iterator[Entry]:
    """Yields the entries of a mapping that have string keys; nothing for any other node."""
    if isinstance(node, Mapped):
        yield from (entry for entry in node.entries if isinstance(entry.key, str))


def _described(node: Node) -> str:
    if isinstance(node, Call):
        return f"a call of {node.constructor!r}"
    return f"a '{describe(node)}'"
