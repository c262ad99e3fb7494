"""Looks up paths in a graph, and suggests the nearest paths for one that does not exist.

The inputs are a graph and the text of a path; the output is the value or an error with suggestions. Invariant: all
commands, and the option `--set`, find the same value at a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from forgather.config.graph import Entry, Graph, Mapped, Node, describe
from forgather.config.path import GraphPath, Index, Key, format_path, parse_path
from forgather.config.traverse import Step, children, edges
from forgather.errors import GraphError, nearest
from forgather.spelling import close_matches

_NEAR = 3
_CUTOFF = 0.7


@dataclass(frozen=True, slots=True)
class PathStep:
    """One step on the path to a value.

    Args:
        path: the path up to this step.
        node: the value at that path.
        entry: the entry of the value in its container or call; None if the value has no entry.
    """

    path: GraphPath
    node: Node
    entry: Entry | None


def read_path(text: str) -> GraphPath:
    """Returns the path that a text describes; `.name` is the path of the definition of that name.

    Raises:
        GraphError: FG310 if the text is not a path.
    """
    if not text.startswith("."):
        return parse_path(text)
    # A path cannot begin with a dot otherwise, so `.base.lr` needs no quotes.
    first, *rest = parse_path(text[1:])
    return (Key(f".{first.name}"), *rest) if isinstance(first, Key) else parse_path(text)


def path_text(path: GraphPath) -> str:
    """Returns the text of a path, in the form that `read_path` reads.

    Example:
        >>> path_text((Key(".base"), Key("lr")))
        '.base.lr'
    """
    name = path[0].name if path and isinstance(path[0], Key) else None
    if isinstance(name, str) and name.startswith("."):
        plain = format_path((Key(name[1:]), *path[1:]))
        if not plain.startswith("["):
            return "." + plain
    return format_path(path)


def root_entry(graph: Graph, name: object) -> Entry | None:
    """Returns the target of that name, or the last definition of that name; None if there is neither."""
    if isinstance(name, str) and name in graph.targets:
        return graph.targets[name]
    matches = [entry for entry in graph.definitions if entry.key == name]
    # Definitions may repeat; aliases after the last one refer to it.
    return matches[-1] if matches else None


def child_at(node: Node, step: Step) -> tuple[Node, Entry | None] | None:
    """Returns the value at a step and its entry; None if there is no value. `[3]` also finds the mapping key 3."""
    for other, child, entry in edges(node):
        # `options[3]` cannot show whether 3 is a position or an integer key.
        if other == step or (isinstance(node, Mapped) and isinstance(step, Index) and other == Key(step.position)):
            return child, entry
    return None


def steps_along(graph: Graph, path: GraphPath) -> list[PathStep]:
    """Returns a `PathStep` for each step of `path` that exists, from the root on."""
    first = path[0]
    entry = root_entry(graph, first.name if isinstance(first, Key) else first.position)
    if entry is None:
        return []
    stops = [PathStep(path[:1], entry.value, entry)]
    for depth, step in enumerate(path[1:], start=2):
        found = child_at(stops[-1].node, step)
        if found is None:
            break
        stops.append(PathStep(path[:depth], *found))
    return stops


def find_values(graph: Graph, text: str, known: Iterable[tuple[GraphPath, Node]]) -> list[PathStep]:
    """Returns the value at a path, or all values whose paths match a pattern.

    Args:
        graph: the config.
        text: the path or pattern; `*` matches any key or position, `**` any number of keys and positions.
        known: the paths that exist, with their nodes, for patterns and for suggestions.

    Raises:
        GraphError: FG311 if there is no value at the path; the hint names the nearest paths. FG445 if no path matches
            the pattern.
    """
    if "*" in text:
        # `[*]` and `*` match one step: they stop at dots and brackets.
        wanted = re.compile(_pattern(text))
        found = [
            stops[-1] for path, _ in known if wanted.fullmatch(path_text(path)) and (stops := steps_along(graph, path))
        ]
        if not found:
            hint = "`*` is one key or position, `**` any number: '**.learning_rate', 'callbacks[*]'"
            raise GraphError(f"no value of the config fits {text!r}", code="FG445", path=text, hint=hint)
        return found
    path = read_path(text)
    stops = steps_along(graph, path)
    if len(stops) < len(path):
        _not_there(text, path, stops, [path_text(other) for other, _ in known])
    return stops[-1:]


def _pattern(text: str) -> str:
    if text.startswith("**."):
        return r"(?:.*[.\]])?\.?" + _pattern(text[3:])
    parts = re.split(r"(\*\*?)", text)
    return "".join({"**": r".*", "*": r"[^.\[\]]*"}.get(part) or re.escape(part) for part in parts)


def _not_there(text: str, path: GraphPath, stops: list[PathStep], known: list[str]) -> NoReturn:
    inside = list(children(stops[-1].node)) if stops else []
    names = [str(step.name) for step, _ in inside if isinstance(step, Key)]
    hint: str | None = None
    if stops and not inside:
        hint = f"nothing is inside {path_text(stops[-1].path)}"
    # With a part of the path found, the mistake is in the next step; else it may be anywhere.
    elif near := _near_inside(stops[-1], path[len(stops)], names) if stops else near_paths(text, known):
        hint = f"did you mean {' or '.join(near)}?"
    elif names:
        hint = f"{path_text(stops[-1].path)} has: {', '.join(names[:20])}"
    elif stops:
        hint = f"{path_text(stops[-1].path)} has {len(inside)} items"
    else:
        tops = [name for name in known if "." not in name and "[" not in name]
        hint = nearest(str(getattr(path[0], "name", "")), tops) or "see `fgcli graph`"
    if not stops:
        raise GraphError(f"the config has no value {text!r}", code="FG311", path=text, hint=hint)
    message = f"the config has no value {text!r}: {path_text(stops[-1].path)} is {describe(stops[-1].node)}"
    raise GraphError(message, code="FG311", path=text, span=stops[-1].node.span, hint=hint)


def _near_inside(stop: PathStep, step: Step, names: list[str]) -> list[str]:
    """Returns a list with the path of the key that is most similar to a missing step, or an empty list."""
    wanted = str(step.name) if isinstance(step, Key) else ""
    return [path_text((*stop.path, Key(name))) for name in close_matches(wanted, names, n=1)]


def near_paths(text: str, known: Iterable[str]) -> list[str]:
    """Returns the paths that the user may have meant: paths with the same end, or with a similar spelling.

    Example:
        >>> near_paths("learning_rat", ["optimizer.lr", "trainer_args.learning_rate"])
        ['trainer_args.learning_rate']
    """
    paths = list(known)
    ends: dict[str, list[str]] = {}
    for path in paths:
        ends.setdefault(_last(path), []).append(path)
    found = sorted((path for path in paths if path.endswith((f".{text}", f"]{text}"))), key=len)
    # First exact ends (`learning_rate`), then similar paths, then similar last parts: from the surest guess to the
    # weakest.
    found += close_matches(text, paths, n=_NEAR, cutoff=_CUTOFF)
    for end in close_matches(_last(text), ends, n=_NEAR, cutoff=_CUTOFF):
        found += sorted(ends[end], key=lambda path: (path.count(".") + path.count("["), path))
    return list(dict.fromkeys(found))[:_NEAR]


def _last(path: str) -> str:
    return re.split(r"[.\[]", path)[-1].rstrip("]")
