"""The place in a config that an error of a constructor or a run speaks of.

Takes an error that names a setting and the project whose graph holds it, gives the error a place. Keeps true: a place
that is already there stays; nothing is guessed from words that are no setting of the call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forgather.config.graph import Call, Entry, Graph
from forgather.config.path import GraphPath, Key, format_path, parse_path
from forgather.config.traverse import walk
from forgather.errors import BuildNote, ForgatherError, GraphError, UnknownTargetError
from forgather.project.written import Writers

if TYPE_CHECKING:
    from forgather.project.project import Project

_WORD = re.compile(r"[A-Za-z_]\w*")


def pinpoint(error: ForgatherError, project: Project) -> None:
    """Gives an error without a place that of the setting that it names.

    An error that a constructor raised is looked up among the keywords of that call; one that the run raised, among
    all keywords of `main`, where only names with an underscore count: a bare word may be prose. The argument that an
    error says it is about comes first.
    """
    if error.span is not None or isinstance(error, UnknownTargetError):
        return
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, BuildNote)]
    settings = dict(_settings(project.graph, notes[0].path if notes else None))
    told = (error.argument or "").rpartition(".")[2]
    for word in (told, *_WORD.findall(error.message)):
        if word in settings and (notes or "_" in word or word == told):
            path, entry = settings[word]
            error.path = format_path(path)
            # What an alias names was written elsewhere: that is the place to mend.
            written = entry.value.span if entry.alias and entry.value.span is not None else entry.span
            error.span = Writers(project).span(written, error.path)
            return


def _settings(graph: Graph, call: str | None) -> Iterator[tuple[str, tuple[GraphPath, Entry]]]:
    main = graph.targets.get("main")
    if call is not None:
        top = _root(call)
        main = graph.targets.get(top) if top else None
    if main is None:
        return
    found: dict[str, tuple[GraphPath, Entry]] = {}
    for path, node in walk([((Key(main.key),), main.value)]):
        if isinstance(node, Call) and call in (None, format_path(path)):
            for entry in node.kwargs:
                found.setdefault(str(entry.key), ((*path, Key(entry.key)), entry))
    yield from found.items()


def _root(call: str) -> str | None:
    try:
        first = parse_path(call)[0]
    except GraphError:
        return None
    return first.name if isinstance(first, Key) and isinstance(first.name, str) else None
