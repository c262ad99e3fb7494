"""The precedence of settings: which of two was written closer to the config, also under a current and an older name.

Takes the templates of a config; gives whether a setting counts although another one overrides its effect, and a graph
in which every setting has one name. A value of the library is a default, and a value of a parent template is a default
for a child that sets something else.
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
from forgather.rules import Rules, shipped_rules
from forgather.source import Origin

_GIVEN = -1
_UNKNOWN = 1_000_000


class Precedence:
    """The order of the templates of a config, the closest first.

    Args:
        project_dir: the folder of the user's own templates.
        files: files of the templates in the order of loading, the config first.
    """

    def __init__(self, project_dir: str, files: Iterable[str]) -> None:
        self._own = os.path.join(project_dir, "")
        self._ranks: dict[str, int] = {}
        for rank, file in enumerate(files):
            self._ranks.setdefault(file, rank)

    def takes_effect(self, setting: Entry, other: Entry | None, *, given_only: bool = False) -> bool:
        """Returns whether the user wrote a setting, and nothing closer to the config contradicts it.

        Args:
            setting: the setting that may have no effect.
            other: the setting that overrides it; None for a default.
            given_only: whether only an option of the command line counts as closer.
        """
        if setting.origin is None or not setting.origin.span.file.startswith((self._own, "<")):
            return False
        theirs = self._rank(other)
        return theirs != _GIVEN if given_only else self._rank(setting) <= theirs

    def is_nearer(self, setting: Entry, other: Entry) -> bool:
        """Returns whether a setting was written closer to the config than another one."""
        return self._rank(setting) < self._rank(other)

    def _rank(self, entry: Entry | None) -> int:
        if entry is None:
            return _UNKNOWN
        return min(self._rank_of(entry.origin), self._rank_of(entry.value.origin))

    def _rank_of(self, origin: Origin | None) -> int:
        if origin is None:
            return _UNKNOWN
        # A pseudo file is the command line, which is closer than any template.
        if any(site.span.file.startswith("<") for site in (*origin.sites, *origin.sets)):
            return _GIVEN
        return min(self._ranks.get(site.span.file, _UNKNOWN) for site in origin.sites)


def without_duplicate_settings(graph: Graph, precedence: Precedence) -> Graph:
    """Returns a graph in which every setting has one name, if templates use an old and a new name for it.

    Args:
        graph: the graph.
        precedence: decides which value counts.
    """
    swaps: dict[int, Node] = {}
    for _, node in all_nodes(graph):
        if isinstance(node, Call) and (rules := _rules(node)) is not None:
            kept = _unique_settings(node.kwargs, rules, precedence)
            if len(kept) < len(node.kwargs):
                swaps[id(node)] = replace(node, kwargs=kept)
    return replace_nodes(graph, lambda node: swaps.get(id(node), node)) if swaps else graph


def settable_paths(graph: Graph, assignments: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the assignments of `--set`; an old name gets a `+` if the config uses the new one.

    Args:
        graph: the graph.
        assignments: pairs of graph path and YAML text.
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
    known = shipped_rules().get(node.constructor)
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
            # Both names are equally close: both stay, and the check reports the conflict.
            kept[entry.key if entry.key != name else earlier.key] = entry
    return tuple(kept.values())
