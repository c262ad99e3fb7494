"""Refusals: what cannot be written as Python, with its place.

Takes a node and its path, gives an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forgather.config.graph import Node
from forgather.config.path import GraphPath, format_path
from forgather.config.yaml.events import Refusal
from forgather.errors import GraphError

_HINTS = {
    "FG331": "build it with the config: Project(...)(target), or export a target that does not need it",
    "FG332": "'fgcli check' says what is wrong with a config; export a target that does not need it",
}


def cannot(code: str, message: str, node: Node, path: GraphPath) -> GraphError:
    """Returns the error that says what stands in the way of Python code."""
    message = f"{message}, which plain Python cannot say" if code == "FG331" else message
    return GraphError(message, code=code, span=node.span, path=format_path(path), hint=_HINTS[code])


@contextmanager
def located(node: Node, path: GraphPath) -> Iterator[None]:
    """Gives a refusal that leaves this block the place of a node."""
    try:
        yield
    except Refusal as refusal:
        raise GraphError(
            refusal.message, code=refusal.code, span=node.span, path=format_path(path), hint=refusal.hint
        ) from None
