"""Where the user wrote a value that a line of somebody else's template prints.

Takes places and paths of one project's graph, gives the line of the project, or the option, that the value came from.
Keeps true: a place inside the project stays; so does one whose value has no such writer, or several.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from forgather.config.insight.path_lookup import follow, read_path
from forgather.errors import Diagnostic, ForgatherError
from forgather.project.declared import read_options
from forgather.source import Origin, Site, Span, option_place, variable_of

if TYPE_CHECKING:
    from forgather.project.project import Project


class Writers:
    """Finds who wrote values.

    Args:
        project: whose graph and files they are.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        self._own = os.path.join(project.meta.project_dir, "")

    def placed(self, found: Diagnostic) -> Diagnostic:
        """Returns a finding about a value at the line that wrote it, with the line that prints it as its context."""
        span = self.span(found.span, found.path)
        if span is None or span == found.span:
            return found
        return replace(found, span=span, context=(*found.context, f"printed at {found.span}"))

    def span(self, span: Span | None, path: str | None) -> Span | None:
        """Returns the place of a `set` in the project, or of an option; `span` where the value came from neither."""
        if span is None or path is None or not os.path.isabs(span.file) or span.file.startswith(self._own):
            return span
        sites = {site.span: site for origin in self._origins(path) if origin.span.line == span.line
                 and origin.span.file == span.file for site in self._writers(origin)}  # fmt: skip
        if len(sites) != 1:
            return span
        return self._shown(next(iter(sites.values())))

    def _origins(self, path: str) -> Iterable[Origin]:
        try:
            steps = read_path(path)
        except ForgatherError:
            return ()
        stops = follow(self._project.graph, steps)
        if len(stops) < len(steps):
            return ()
        entry = stops[-1].entry
        return [origin for origin in (stops[-1].node.origin, entry.origin if entry else None) if origin is not None]

    def _writers(self, origin: Origin) -> Iterable[Site]:
        for site in origin.sets:
            if variable_of(site) is not None or site.span.file.startswith(self._own):
                yield site

    def _shown(self, site: Site) -> Span:
        variable = variable_of(site)
        # A config that cannot be read is a finding of its own.
        with suppress(ForgatherError):
            for option in read_options(self._project.declared_graph).options:
                if option.variable == variable:
                    return Span(option_place(option.names[0]), 1)
        return site.span
