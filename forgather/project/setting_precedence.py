"""The precedence of settings: which of two settings wins if they conflict, or have an old and a new name.

The input is the templates of a config. The command line has the highest precedence, followed by the config and then
each template that it extends. A setting of the library is only a default, and so is a setting of a parent template if a
child template sets something that conflicts with it. `Precedence` decides whether a setting takes effect, and
`without_duplicate_settings` gives every setting one name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from forgather.config.graph import Call, Entry, Graph, Node
from forgather.config.insight.path_lookup import path_text, read_path, steps_along
from forgather.config.path import Key
from forgather.config.traverse import all_nodes, replace_nodes
from forgather.config.yaml.merge import overriding
from forgather.errors import ForgatherError
from forgather.project.constructor_rules import rules_of
from forgather.rules import Rules
from forgather.source import Origin

# Ranks before and after those of all templates: the command line, and an unknown origin.
_GIVEN = -1
_UNKNOWN = 1_000_000


class Precedence:
    """The order of the templates of a config, from the highest precedence to the lowest.

    Args:
        project_dir: the project's folder; templates in this folder are the user's own.
        files: the files of the templates in the order in which they are loaded, the config first.
    """

    def __init__(self, project_dir: str, files: Iterable[str]) -> None:
        self._own = os.path.join(project_dir, "")
        self._ranks: dict[str, int] = {}
        for rank, file in enumerate(files):
            self._ranks.setdefault(file, rank)

    def takes_effect(self, setting: Entry, other: Entry | None, *, given_only: bool = False) -> bool:
        """Returns whether the user wrote a setting, and no setting of higher precedence overrides it.

        Args:
            setting: the setting that may have no effect.
            other: the setting that overrides the first one; None if a default overrides it.
            given_only: whether only an option of the command line overrides the setting.
        """
        if setting.origin is None or not setting.origin.span.file.startswith((self._own, "<")):
            return False
        theirs = self._rank(other)
        return theirs != _GIVEN if given_only else self._rank(setting) <= theirs

    def is_nearer(self, setting: Entry, other: Entry) -> bool:
        """Returns whether a setting has a higher precedence than another one."""
        return self._rank(setting) < self._rank(other)

    def _rank(self, entry: Entry | None) -> int:
        if entry is None:
            return _UNKNOWN
        return min(self._rank_of(entry.origin), self._rank_of(entry.value.origin))

    def _rank_of(self, origin: Origin | None) -> int:
        if origin is None:
            return _UNKNOWN
        # A pseudo file is the command line, which has precedence over all templates.
        if any(site.span.file.startswith("<") for site in (*origin.sites, *origin.sets)):
            return _GIVEN
        return min(self._ranks.get(site.span.file, _UNKNOWN) for site in origin.sites)


def without_duplicate_settings(graph: Graph, precedence: Precedence) -> Graph:
    """Returns a graph in which every setting has one name, even if templates use an old and a new name of the setting.

    Args:
        graph: the graph.
        precedence: the order of the templates, which decides whose value is used.
    """
    swaps: dict[int, Node] = {}
    for _, node in all_nodes(graph):
        if isinstance(node, Call) and (rules := _rules(node)) is not None:
            kept = _unique_settings(node.kwargs, rules, precedence)
            if len(kept) < len(node.kwargs):
                swaps[id(node)] = replace(node, kwargs=kept)
    return replace_nodes(graph, lambda node: swaps.get(id(node), node)) if swaps else graph


def settable_paths(graph: Graph, assignments: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns assignments for `--set`, in which an old name has the prefix `+` if the config uses the new name.

    Args:
        graph: the graph.
        assignments: the pairs of graph path and YAML text.
    """
    return [(_settable_path(graph, path), value) for path, value in assignments]


def _settable_path(graph: Graph, text: str) -> str:
    try:
        path = read_path(text.removeprefix("+"))
    except ForgatherError:
        return text
    last = path[-1]
    stops = steps_along(graph, path[:-1]) if len(path) > 1 else []
    if len(stops) < len(path) - 1 or not stops or not isinstance(last, Key):
        return text
    holder = stops[-1].node
    rules = _rules(holder) if isinstance(holder, Call) else None
    present = rules.renamed.get(str(last.name)) if rules is not None else None
    written = {entry.key for entry in holder.kwargs} if isinstance(holder, Call) else set()
    if present is None or last.name in written or present not in written:
        return text
    # The old name has its own rules, which are reported where the call is checked; so it is added instead of replaced.
    return f"+{path_text(path)}"


def _rules(node: Call) -> Rules | None:
    known = rules_of(node.constructor)
    return known[0] if known and known[0].renamed else None


def _unique_settings(entries: tuple[Entry, ...], rules: Rules, precedence: Precedence) -> tuple[Entry, ...]:
    kept: dict[object, Entry] = {}
    for entry in entries:
        name = rules.renamed.get(str(entry.key), entry.key)
        earlier = kept.get(name)
        if earlier is None:
            kept[name] = entry
        elif precedence.is_nearer(entry, earlier):
            kept[name] = overriding(entry, earlier)
        elif precedence.is_nearer(earlier, entry):
            kept[name] = overriding(earlier, entry)
        else:
            # Both names have the same precedence: both are kept, and the check reports the conflict.
            kept[entry.key if entry.key != name else earlier.key] = entry
    return tuple(kept.values())
