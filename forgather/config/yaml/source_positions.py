"""Maps positions of the rendered text to places in the user's files.

The input is a `RenderedText`; the output is the origins of events, and errors with a span and the chain of templates.
Invariants: an error of loading never has a line of the rendered text as its only place; a column is given only if the
rendered line equals the line of the file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from forgather.config.rendered import RenderedText
from forgather.config.yaml.events import Event
from forgather.errors import Diagnostic, ForgatherError, LoadError, Severity
from forgather.source import Origin, Site, Span, variable_of

Template = tuple[str, str]
"""A template, given by its file and its name."""
Fault = TypeVar("Fault", bound=ForgatherError)


class SourcePositions:
    """The map from positions in one rendered text to origins, errors and findings.

    Args:
        rendered: the rendered text with its source map.
    """

    def __init__(self, rendered: RenderedText) -> None:
        self._rendered = rendered
        # Bound once, because it is called for each event.
        self.at = rendered.source_map.at
        self._between = rendered.source_map.between

    @cached_property
    def descents(self) -> frozenset[tuple[Template, Template]]:
        """The pairs of a template and a template that it extends, directly or through others."""
        uses = self._rendered.templates
        pairs: set[tuple[Template, Template]] = set()
        for use in uses:
            extended = use
            while extended.why == "extends" and extended.parent is not None:
                extended = uses[extended.parent]
                pairs.add(((extended.file, extended.name), (use.file, use.name)))
        return frozenset(pairs)

    def origin(self, event: Event) -> Origin | None:
        """Returns the origin of the text of `event`; for a container, that of its tag or of its first character."""
        end = event.end
        if end is None:
            return self.at(event.line, event.column)
        # A value that several lines wrote (`"{{ a }}{{ b }}"`) has all of them as its parts.
        return self._between(event.line, event.column, end.line + 1, end.column + 1)

    @cached_property
    def blocks(self) -> frozenset[str]:
        """The names of the blocks that wrote any part of the text."""
        origins = self._rendered.source_map.origins
        return frozenset(site.block for origin in origins for site in origin.sites if site.block)

    def builds_on(self, ours: Origin | None, theirs: Origin | None) -> bool:
        """Returns whether the template of `ours` extends or includes that of `theirs`."""
        if ours is None or theirs is None:
            return False
        own, others = template_of(ours.site), [template_of(site) for site in theirs.sites]
        # The sites before the last one are the includes that led to the text.
        return own in others[:-1] or (own, others[-1]) in self.descents

    def extends(self, ours: Origin | None, theirs: Origin | None) -> bool:
        """Returns whether the template of `ours` extends that of `theirs`."""
        if ours is None or theirs is None:
            return False
        return (template_of(ours.site), template_of(theirs.site)) in self.descents

    def span(self, line: int, column: int = 1) -> Span:
        """Returns the place in the user's file for a position in the rendered text."""
        origin = self.at(line, column)
        if origin is None:
            return Span(self._rendered.file, 1)
        # A column of rendered text would point at the wrong character of a line with expressions.
        return replace(origin.span, column=column) if self._is_verbatim(origin, line) else origin.span

    def is_verbatim(self, event: Event) -> bool:
        """Returns whether the rendered line of `event` equals the line of its file."""
        origin = self.at(event.line, event.column)
        return origin is not None and self._is_verbatim(origin, event.line)

    def _is_verbatim(self, origin: Origin, line: int) -> bool:
        source = self._rendered.sources.get(origin.span.file)
        return (
            source is not None and not origin.approximate and source.line(origin.span.line) == self.rendered_line(line)
        )

    def rendered_line(self, line: int) -> str:
        """Returns a line of the rendered text."""
        return self._lines[line - 1] if line <= len(self._lines) else ""

    @cached_property
    def _lines(self) -> list[str]:
        return self._rendered.text.split("\n")

    def moved_by(self, line: int) -> str | None:
        """Returns the indented statement whose leading spaces indent a rendered line; None if there is none."""
        text = self.rendered_line(line)
        indent = len(text) - len(text.lstrip(" "))
        origin = self.at(line, indent + 1)
        source = self._rendered.sources.get(origin.span.file) if origin and not origin.approximate else None
        if origin is None or source is None or origin.span.line < 2:
            return None
        own, above = source.line(origin.span.line), source.line(origin.span.line - 1)
        blanks = len(above) - len(above.lstrip(" "))
        is_moved = blanks and own.lstrip(" ") == text.lstrip(" ") and indent == blanks + len(own) - len(own.lstrip(" "))
        statement = above.strip()
        return statement if is_moved and statement.startswith("{%") and statement.endswith("%}") else None

    def opens_line(self, event: Event) -> bool:
        """Returns whether `event` is the first text on its line."""
        return not self.rendered_line(event.line)[: event.column - 1].strip()

    def fault(
        self,
        message: str,
        line: int,
        column: int,
        *,
        code: str,
        hint: str | None = None,
        kind: type[Fault] = LoadError,  # type: ignore[assignment]
    ) -> Fault:
        """Returns an error located at a position of the rendered text.

        Args:
            message: a description of what was found.
            line: the line in the rendered text, counted from 1.
            column: the column in the rendered text, counted from 1.
            code: the error code.
            hint: a suggestion of what the user can do.
            kind: the class of the error.
        """
        span, context = self.span(line, column), self.context(line, column)
        return kind(message, code=code, span=span, hint=hint, context=context)

    def fault_at(self, event: Event, message: str, *, code: str, hint: str | None = None) -> LoadError:
        """Returns a `LoadError` located at `event`."""
        return self.fault(message, event.line, event.column, code=code, hint=hint)

    def finding(
        self, event: Event, message: str, *, code: str, severity: Severity, hint: str | None = None
    ) -> Diagnostic:
        """Returns a diagnostic located at `event`."""
        return Diagnostic(
            code=code,
            message=message,
            severity=severity,
            span=self.span(event.line, event.column),
            hint=hint,
            context=self.context(event.line, event.column),
        )

    def context(self, line: int, column: int) -> tuple[str, ...]:
        """Returns lines of text that name the templates and statements behind a position of the rendered text."""
        rendered = self._rendered
        config = rendered.templates[0].name if rendered.templates else rendered.name
        lines = [", ".join([f"config {config}", *(f"extends {name}" for name in rendered.extends_chain)])]
        origin = self.at(line, column)
        if origin is not None:
            # The last site is the place of the error itself; the others are shown from the inside out.
            lines.extend(f"printed at {_shown(site)}" for site in origin.sites[-2::-1])
            lines.extend(f"set at {_shown(site)}" for site in dict.fromkeys(origin.sets))
        return tuple(lines)

    def anchor_below(self, name: str, line: int) -> Span | None:
        """Returns the place of the first `&name` below a line of the rendered text; None if no such anchor follows."""
        # A search in the text, because events after an error are not read.
        for number, text in enumerate(self._lines[line:], start=line + 1):
            if re.search(rf"(?:^|[\s\[{{,])&{re.escape(name)}(?=[\s\]}},]|$)", text):
                return self.span(number)
        return None


def _shown(site: Site) -> str:
    """Returns a site (a template line) as `template:line`, or as `file:line` for an inline sub-template of the file."""
    if variable_of(site) is not None:
        return site.span.file
    name = site.template if site.span.file.endswith(site.template) else site.span.file
    return f"{name}:{site.span.line}"


def template_of(site: Site) -> Template:
    """Returns the file and the name of the template that contains a line."""
    return site.span.file, site.template
