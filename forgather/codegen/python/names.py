"""The names of variables in generated code.

The input is a name from the config; the output is an identifier that is unique in the module, and is not a keyword, a
builtin or an import.
"""

from __future__ import annotations

import builtins
import keyword
import re
from typing import Any

from forgather.config.graph import Call, Graph, Node
from forgather.config.path import GraphPath, Key

_LONGEST = 40
_UNREADABLE = re.compile(r"[^A-Za-z0-9_]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Names that look like digits, which ruff rejects (E741).
_MISREAD = frozenset("lOI")
_BUILTIN = frozenset(dir(builtins))


def is_identifier(text: str) -> bool:
    """Returns whether a text can be written as an identifier.

    Only ASCII is accepted, because Python normalizes other letters, so that two different texts can be the same
    identifier.
    """
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text) and text != "__debug__"


def identifier(text: str) -> str:
    """Returns an identifier that resembles a text.

    Example:
        >>> [identifier(text) for text in (".x", "class", "my-model", "1st", "Modèle", "模型", "list")]
        ['x', 'class_', 'my_model', 'n1st', 'Modele', 'value', 'list_']
    """
    # Imported late: most configs contain only ASCII names.
    if not text.isascii():
        import unicodedata

        text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    found = _UNREADABLE.sub("_", text).strip("_")[:_LONGEST].strip("_") or "value"
    found = f"n{found}" if found[0].isdigit() else found
    return f"{found}_" if keyword.iskeyword(found) or found in _BUILTIN or found in _MISREAD else found


class Names:
    """The names of one module, each used once.

    Args:
        taken: the names that are already used.
    """

    def __init__(self, taken: set[str]) -> None:
        self._taken = taken
        # Names are never released, so the search for a free number continues after the last one.
        self._next: dict[str, int] = {}

    def free(self, wanted: str) -> str:
        """Returns an unused identifier, which is `wanted` or `wanted` with a number, and reserves it."""
        base = identifier(wanted)
        found, stem = base, base.rstrip("_")
        number = self._next.get(stem, 2)
        while found in self._taken:
            found, number = f"{stem}_{number}", number + 1
            self._next[stem] = number
        self._taken.add(found)
        return found


def name_for(graph: Graph, node: Node, path: GraphPath) -> str:
    """Returns the best name for the variable of a node: its `@name`, anchor, target, key or constructor.

    Args:
        graph: the graph.
        node: the node.
        path: the path of the node in the graph.
    """
    return node.name or graph.anchors.get(id(node)) or _target(graph, node) or _last_key(path) or _maker(node)


def is_named(graph: Graph, node: Node) -> bool:
    """Returns whether the user gave a node a name: by `@name`, an anchor or a target."""
    return bool(node.name or id(node) in graph.anchors or _target(graph, node))


def _target(graph: Graph, node: Node) -> str | None:
    if _targets_of[0] is not graph.targets:
        names: dict[int, str] = {}
        for key, entry in graph.targets.items():
            names.setdefault(id(entry.value), key)
        _targets_of[:] = graph.targets, names
    found: str | None = _targets_of[1].get(id(node))
    return found


# The targets of the last graph, and the name of each of their nodes by id. The targets are kept, because an id can be
# reused after its node is freed.
_targets_of: list[Any] = [None, {}]


def _last_key(path: GraphPath) -> str | None:
    keys = [step.name for step in path if isinstance(step, Key)]
    return keys[-1] if keys and isinstance(keys[-1], str) and _UNREADABLE.sub("", keys[-1]) else None


def _maker(node: Node) -> str:
    if isinstance(node, Call):
        return _HUMP.sub("_", node.constructor.rpartition(":")[2].rpartition(".")[2]).lower()
    return "value"
