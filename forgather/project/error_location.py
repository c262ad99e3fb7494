"""The location at which the user can fix an error, if a template of the library prints the wrong value.

The input is a location and a path in the project's graph; the output is the line of the project, or the command-line
option, that set the value. The location does not change if it is inside the project already, or if the value was set
by several lines or by none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from forgather.config.graph import Call, Entry, Graph
from forgather.config.insight.path_lookup import read_path, steps_along
from forgather.config.path import GraphPath, Key, format_path, parse_path
from forgather.config.traverse import walk
from forgather.errors import BuildNote, Diagnostic, ForgatherError, GraphError
from forgather.project.dynamic_args import read_options
from forgather.source import Origin, Site, Span, option_place, variable_of


class Writers:
    """Finds the lines and options that set the values of a graph.

    Args:
        project_dir: the folder of the project; files in it belong to the user.
        graph: the graph that is built.
        declared: the graph before overrides, which declares the command-line options.
    """

    def __init__(self, project_dir: str, graph: Graph, declared: Graph) -> None:
        self.graph = graph
        self._declared = declared
        self._own = os.path.join(project_dir, "")

    def relocated(self, found: Diagnostic) -> Diagnostic:
        """Returns a finding located at the line that set the value, with the line that prints the value as context."""
        span = self.span(found.span, found.path)
        if span is None or span == found.span:
            return found
        return replace(found, span=span, context=(*found.context, f"printed at {found.span}"))

    def span(self, span: Span | None, path: str | None) -> Span | None:
        """Returns the location of a `set` statement in the project, or of an option, that set a value.

        Returns `span` unchanged if there is no such statement or option, or several of them.

        Args:
            span: the location of the line that prints the value.
            path: the path of the value in the graph.
        """
        if span is None or path is None or not os.path.isabs(span.file) or span.file.startswith(self._own):
            return span
        sites = {site.span: site for origin in self._origins(path) if origin.span.line == span.line
                 and origin.span.file == span.file for site in self._writers(origin)}  # fmt: skip
        # If several lines wrote the value, none of them is the one place to fix.
        if len(sites) != 1:
            return span
        return self._place_of_site(next(iter(sites.values())))

    def _origins(self, path: str) -> Iterable[Origin]:
        try:
            steps = read_path(path)
        except ForgatherError:
            return ()
        stops = steps_along(self.graph, steps)
        if len(stops) < len(steps):
            return ()
        entry = stops[-1].entry
        return [origin for origin in (stops[-1].node.origin, entry.origin if entry else None) if origin is not None]

    def _writers(self, origin: Origin) -> Iterable[Site]:
        for site in origin.sets:
            if variable_of(site) is not None or site.span.file.startswith(self._own):
                yield site

    def _place_of_site(self, site: Site) -> Span:
        variable = variable_of(site)
        # A config that cannot be read is reported elsewhere; here only a better place was wanted.
        with suppress(ForgatherError):
            for option in read_options(self._declared).options:
                if option.variable == variable:
                    return Span(option_place(option.names[0]), 1)
        return site.span


_WORD = re.compile(r"[A-Za-z_]\w*")


def locate_error(error: ForgatherError, writers: Writers) -> None:
    """Sets the location of an error to the setting that the error names, if it names one.

    For an error of a constructor, the keyword arguments of that call are searched. For an error of the run, all keyword
    arguments in `main` are searched, but only for names with an underscore, because a single word may be part of the
    sentence. If the error itself carries the name of an argument, that name is searched first; "main" is the call of
    the target `main`.

    Args:
        error: the error, whose `path` and `span` are set.
        writers: the finder of the lines that set values.
    """
    call = note_path(error)
    settings = dict(_settings(writers.graph, call))
    marked = (error.argument or "").rpartition(".")[2]
    for word in (marked, *_WORD.findall(error.message)):
        if word in settings and (call is not None or "_" in word or word == marked):
            path, entry = settings[word]
            error.path = format_path(path)
            # The value of an alias is written at its anchor, and has to be fixed there.
            written = entry.value.span if entry.alias and entry.value.span is not None else entry.span
            error.span = writers.span(written, error.path)
            return
    if marked == "main" and (main := writers.graph.targets.get("main")) is not None:
        error.path, error.span = "main", main.value.span


def note_path(error: ForgatherError) -> str | None:
    """Returns the path of the call that raised an error; None if no call of the graph raised it."""
    notes = (note for note in getattr(error, "__notes__", ()) if isinstance(note, BuildNote))
    return next((note.path for note in notes), None)


def shortest_path(graph: Graph, path: str) -> str:
    """Returns a path to the same value that begins at the last target along the given path.

    Only targets that are calls are considered. `fgcli check` names values in the same way.

    Args:
        graph: the graph that is built.
        path: a path from a target; it is returned unchanged if the graph does not have it.
    """
    try:
        steps = read_path(path)
    except ForgatherError:
        return path
    stops = steps_along(graph, steps)
    if len(stops) < len(steps):
        return path
    # The first of several names wins, as in the check.
    names = {id(one.value): one.key for one in reversed([*graph.targets.values()]) if isinstance(one.value, Call)}
    for stop in reversed(stops[1:]):
        if id(stop.node) in names:
            return format_path((Key(names[id(stop.node)]), *steps[len(stop.path) :]))
    return path


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
