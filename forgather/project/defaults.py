"""Default arguments of the constructors that a graph calls.

The input is a graph; the output is the parameters of each constructor with their defaults as text, and the differences
of two such tables. Nothing is imported. A constructor whose signature is unknown is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from forgather.config.graph import Call, Graph
from forgather.config.insight.change import Change, Difference, Side
from forgather.config.path import Key
from forgather.config.traverse import all_nodes, entries
from forgather.errors import ForgatherError
from forgather.project.metadata import ProjectMeta
from forgather.project.reader import reader_for

Defaults = Mapping[str, Mapping[str, str | None]]
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def read_defaults(graph: Graph, meta: ProjectMeta) -> dict[str, dict[str, str | None]]:
    """Returns the parameters of each constructor in order, with the source text of each default.

    The text is None for a parameter without default.

    Args:
        graph: the graph.
        meta: the project, which determines where modules are found.
    """
    from forgather.signatures.results import Callee

    reader = reader_for(meta)
    found: dict[str, dict[str, str | None]] = {}
    for _, node in all_nodes(graph):
        if not isinstance(node, Call) or node.constructor in found or node.submodule_searchpath is not None:
            continue
        try:
            callee = reader.read(node.constructor)
        except ForgatherError:
            continue
        # Of several overloads it is not known which one a call uses.
        if isinstance(callee, Callee) and len(callee.signatures) == 1:
            parameters = callee.signatures[0].parameters.values()
            found[node.constructor] = {p.name: _default_text(p) for p in parameters if p.kind not in _VARIADIC}
    return found


def changed_defaults(old: Graph, new: Graph, then: Defaults, now: Defaults) -> Iterator[Difference]:
    """Yields the defaults that differ.

    Each difference is located at the first call of the constructor that does not pass the argument itself.

    Args:
        old: the graph of the first side.
        new: the graph of the second side.
        then: the defaults of the first side.
        now: the defaults of the second side.
    """
    # Reversed, so that the first call of each constructor remains.
    before = {node.constructor: (path, node) for path, node in reversed(all_nodes(old)) if isinstance(node, Call)}
    reported: set[tuple[str, str]] = set()
    for path, node in all_nodes(new):
        if not isinstance(node, Call) or node.constructor not in before:
            continue
        ours, theirs = then.get(node.constructor), now.get(node.constructor)
        if ours is None or theirs is None:
            continue
        given = {entry.key for entry in entries(node)} | set(list(theirs)[: len(node.args)])
        for name in dict.fromkeys((*ours, *theirs)):
            words = _describe_change(node.constructor, name, ours, theirs)
            if words and name not in given and (node.constructor, name) not in reported:
                reported.add((node.constructor, name))
                place, earlier = before[node.constructor]
                yield Difference(
                    Change.DEFAULT,
                    Side(words[0], earlier.origin, (*place, Key(name))),
                    Side(words[1], node.origin, (*path, Key(name))),
                )


def _describe_change(
    constructor: str, name: str, ours: Mapping[str, str | None], theirs: Mapping[str, str | None]
) -> tuple[str, str] | None:
    call = f"{constructor.replace(':', '.').rpartition('.')[2]}({name}=)"
    if name in ours and name in theirs:
        if ours[name] == theirs[name]:
            return None
        then, now = (f"default {side[name]}" if side[name] is not None else "no default" for side in (ours, theirs))
        return f"{call} had {then},", f"now {now.removeprefix('default ')}"
    if name in theirs:
        return f"{call} is new,", "with " + (f"default {theirs[name]}" if theirs[name] is not None else "no default")
    return f"{call} is gone,", "had " + (f"default {ours[name]}" if ours[name] is not None else "no default")


def _default_text(parameter: inspect.Parameter) -> str | None:
    return None if parameter.default is parameter.empty else str(getattr(parameter.default, "text", parameter.default))
