"""Labels for the origins of values: `file:line`, an option of the config, a variable, or `--set`.

The input is origins of values and lines; the output is short labels for the terminal, or plain data for JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from forgather.config.graph import Graph, Scalar
from forgather.config.insight.blame import Blame, Writing
from forgather.config.insight.line_annotations import Line
from forgather.config.insight.path_lookup import path_text
from forgather.config.insight.show import value_facts
from forgather.config.load import COMMAND_LINE
from forgather.errors import ForgatherError
from forgather.project.path_display import Display
from forgather.source import Origin, Site, Span, variable_of

if TYPE_CHECKING:
    from forgather.project.dynamic_args import DeclaredOption
    from forgather.project.project import Project


class Labels:
    """The labels of places in the files of one project.

    Args:
        file: a function that returns the short name of a file.
        declared: a function that returns the graph in which the config declares its options, or None if there is none.
    """

    def __init__(self, file: Callable[[str], str], declared: Callable[[], Graph | None]) -> None:
        self.file = file
        self._declared = declared

    @classmethod
    def of(cls, project: Project) -> Labels:
        """Returns a `Labels` object for a project."""
        file = Display(project.meta.project_dir, project.meta.workspace_root)
        return cls(file, lambda: project.declared_graph)

    @property
    def named(self) -> dict[str, str]:
        """The absolute paths of the files that were named so far, by short name, for links on a terminal."""
        return self.file.named if isinstance(self.file, Display) else {}

    @cached_property
    def _options(self) -> dict[str, DeclaredOption]:
        # Read when the first option is met: most values come from no option, and the graph would be built for nothing.
        from forgather.project.dynamic_args import read_options

        # If the options cannot be read, that is reported elsewhere; the labels of all other places still work.
        with suppress(ForgatherError):
            graph = self._declared()
            return {option.variable: option for option in read_options(graph).options} if graph is not None else {}
        return {}

    def span(self, span: Span) -> str:
        """Returns the label `file:line` of a place, or `--set` for a place on the command line."""
        if span.file == COMMAND_LINE:
            return "--set"
        return f"{self.file(span.file)}:{span.line}"

    def site(self, site: Site, *, declared: bool = False) -> str:
        """Returns the label of a line, option or variable.

        Args:
            site: the line, option or variable.
            declared: True to include the place where an option is declared.
        """
        variable = variable_of(site)
        if variable is None:
            return self.span(site.span)
        option = self._options.get(variable)
        if option is None:
            return f"variable {variable}"
        where = f", declared at {self.span(option.span)}" if declared and option.span else ""
        return f"option {option.names[0]}{where}"

    def origin(self, origin: Origin | None) -> str:
        """Returns the label of the line from which a text comes; `~` marks an approximate origin.

        An origin is approximate if a filter has changed the text. The label is "" if the origin is None.
        """
        if origin is None:
            return ""
        return self.span(origin.span) + (" ~" if origin.approximate else "")

    def ways(self, writing: Writing) -> Iterator[tuple[str, str, Span]]:
        """Yields the steps by which a value got to its place in the graph: the kind, the label and the span of each.

        The kinds are aliases, merges, `set` statements, further lines of the value ("with"), and includes or macro
        calls ("via").
        """
        last = len(writing.through) - 1
        for number, origin in enumerate(writing.through):
            name = f"alias *{writing.alias}" if number == last and writing.alias != "<<" else "merge <<"
            yield name, self.origin(origin), origin.span
        if writing.origin is None:
            return
        for word, sites in (
            ("set", options_first(writing.origin.sets)),
            ("with", writing.origin.parts),
            ("via", writing.origin.sites[-2::-1]),
        ):
            for site in sites:
                yield word, self.site(site, declared=True), site.span

    def notes(self, line: Line) -> str:
        """Returns a comment on the values of a line: what overrides them, what they replace, and where they are set."""
        found: list[str] = []
        around = {note.path for note in line.notes if note.was or note.winner is not None}
        for note in line.notes:
            with_container = note.path[:-1] in around
            if note.winner is not None and not with_container:
                value = f": {note.winner.text}" if self.where(note.winner) == "--set" else ""
                found.append(f"overridden by {self.where(note.winner)}{value}")
            if note.was and not with_container:
                found.append("was " + ", ".join(writing.text for writing in note.was))
            if note.writing.through and isinstance(note.writing.node, Scalar):
                found.append(f"is {note.writing.text}, {self.origin(note.writing.origin)}")
            elif note.writing.origin is not None:
                found += [f"set at {self.site(site)}" for site in options_first(note.writing.origin.sets)]
        return "; ".join(dict.fromkeys(found))

    def where(self, writing: Writing) -> str:
        """Returns the label of the line that put a value in its place: the line of its alias, or else its own line."""
        return self.origin(writing.through[0] if writing.through else writing.origin)

    def line(self, line: Line) -> dict[str, object]:
        """Returns the values that a line sets, the values that they replace, and those that override them, as data."""
        values = []
        for note in line.notes:
            fact: dict[str, object] = {"path": path_text(note.path), **self._writing(note.writing)}
            if note.winner is not None:
                fact["overridden_by"] = self._writing(note.winner)
            values.append({**fact, "was": [self._writing(writing) for writing in note.was]})
        return {"counts": line.counts, "values": values}

    def facts(self, blamed: Blame) -> dict[str, object]:
        """Returns the origin of a value, and the values that it replaced, as plain data."""
        return {
            "path": path_text(blamed.path),
            **self._writing(blamed.now),
            "was": [self._writing(writing) for writing in blamed.was],
            "around": [{"alias": name, **self.place(origin.site)} for name, origin in blamed.around],
        }

    def _writing(self, writing: Writing) -> dict[str, object]:
        origin = writing.origin
        fact: dict[str, object] = {"value": value_facts(writing.node), "text": writing.text}
        if origin is not None:
            fact |= self.place(origin.site) | {"template": origin.site.template, "approximate": origin.approximate}
        if writing.alias is not None:
            fact |= {"alias": writing.alias, "through": [self.place(item.site) for item in writing.through]}
        if origin is not None:
            fact |= {"sets": self._places(options_first(origin.sets)), "via": self._places(origin.sites[-2::-1])}
            if origin.parts:
                fact["with"] = self._places(origin.parts)
        return fact

    def _places(self, sites: Iterable[Site]) -> list[dict[str, object]]:
        return [self.place(site) for site in sites]

    def place(self, site: Site) -> dict[str, object]:
        """Returns the place of a line, option or variable as plain data."""
        variable = variable_of(site)
        if variable is not None:
            option = self._options.get(variable)
            return {"variable": variable, "option": option.names[0] if option else None}
        if site.span.file == COMMAND_LINE:
            return {"file": COMMAND_LINE, "line": 1}
        return {"file": self.file(site.span.file), "line": site.span.line}


def options_first(sites: Iterable[Site]) -> list[Site]:
    """Returns places in the given order, except that options and variables come before lines of files."""
    return sorted(sites, key=lambda site: variable_of(site) is None)


def cause_of(origin: Origin | None, other: Origin | None) -> Site | None:
    """Returns the place that causes the value in one of the two graphs of a difference.

    If an option was given for this graph only, the place is that option. Otherwise the place is the line of the value,
    unless the same line prints the values of both graphs. In this case the place is the `set` statement that differs,
    or the option that was given for both graphs.

    Args:
        origin: the origin of the value in one graph; None if it is unknown.
        other: the origin of the value in the other graph.
    """
    if origin is None:
        return None
    sets = options_first(origin.sets)
    theirs = [(site.template, site.span.line) for site in other.sets] if other is not None else []
    own = [site for site in sets if (site.template, site.span.line) not in theirs]
    given = [site for site in sets if variable_of(site) is not None]
    if own and own[0] in given:
        return own[0]
    if other is not None and origin.site.template == other.site.template and origin.span.line == other.span.line:
        return next(iter((*own, *given)), origin.site)
    return origin.site
