"""Places in the user's files, and the source map from rendered text to them.

Every stage, from rendering to construction, passes on these records: `Span` (a place in a file), `Site` (a place with
its template and block), `Origin` (the sites that wrote a piece of text) and `SourceMap` (the origins of a rendered
text). Lines and columns are 1-based. Files are absolute paths or pseudo names such as `<command line>`. The module does
not depend on templates or YAML.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a file that the user wrote.

    Args:
        file: the absolute path of the file, or a name in angle brackets (`<command line>`) if there is no file.
        line: the line, counted from 1.
        column: the column, counted from 1; 0 if only the line is known.
    """

    file: str
    line: int
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a template, with the template and block that contain it.

    Args:
        span: the place of the line.
        template: the name under which the template was loaded (`trainers/trainer.yaml`, or the name of an inline
            sub-template).
        block: the name of the innermost block around the line; None if the line is outside any block.
    """

    span: Span
    template: str
    block: str | None = None


def variable_place(name: str) -> str:
    """Returns `<variable NAME>`, the pseudo file of a template variable.

    A `Span` has this name in place of a file if an option or a Python caller has set the variable.
    """
    return f"<variable {name}>"


def variable_of(site: Site) -> str | None:
    """Returns the name of the variable if the file of a site is a name from `variable_place`; otherwise None."""
    file = site.span.file
    return file[10:-1] if file.startswith("<variable ") else None


def option_place(name: str) -> str:
    """Returns `<option NAME>`, the name that the `Span` of a command-line option has in place of a file."""
    return f"<option {name}>"


@dataclass(frozen=True, slots=True)
class Origin:
    """The sites that wrote a piece of rendered text.

    Args:
        sites: the lines that led to the text, outermost first: each include, macro call or printing expression, and at
            last the line that contains the text itself. `super()` adds no site.
        sets: the last executed `set` of each name in the expression that printed the text.
        approximate: whether a filter has changed the text, so that `sites[-1]` is only the line that prints the text.
        parts: the other lines that wrote a part of the text.
    """

    sites: tuple[Site, ...]
    sets: tuple[Site, ...] = ()
    approximate: bool = False
    parts: tuple[Site, ...] = ()

    @property
    def site(self) -> Site:
        """The line that contains the text itself."""
        return self.sites[-1]

    @property
    def span(self) -> Span:
        """The place of the line that contains the text itself."""
        return self.sites[-1].span


@dataclass(frozen=True)
class SourceFile:
    """The text of a file as it was read.

    Args:
        file: the absolute path of the file, or a pseudo name.
        text: the decoded text, with `\\n` line ends.
    """

    file: str
    text: str

    def line(self, number: int) -> str:
        """Returns line `number` (1-based) without its line end; "" if the file has no such line."""
        return self._lines[number - 1] if 0 < number <= len(self._lines) else ""

    @cached_property
    def _lines(self) -> list[str]:
        # Not splitlines(): it also splits at characters such as U+2028, which do not end a line in an editor.
        return self.text.split("\n")


@dataclass(frozen=True)
class SourceMap:
    """Maps offsets of a rendered text to origins.

    Args:
        text: the rendered text.
        starts: the offset at which each segment of the text begins, ascending from 0.
        origins: the origin of each segment.
    """

    text: str
    starts: Sequence[int]
    origins: Sequence[Origin]
    _line_starts: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        offsets = [0]
        find = self.text.find
        while (found := find("\n", offsets[-1])) >= 0:
            offsets.append(found + 1)
        # The class is frozen, so a derived field is set this way.
        object.__setattr__(self, "_line_starts", offsets)

    def at_offset(self, offset: int) -> Origin | None:
        """Returns the origin of the character at `offset`; None if the text is empty."""
        if not self.starts:
            return None
        # The segment that contains the offset is the last one that starts at or before it.
        return self.origins[max(bisect_right(self.starts, offset) - 1, 0)]

    def at(self, line: int, column: int) -> Origin | None:
        """Returns the origin of a place in the rendered text; columns past the end of the line are clamped.

        Args:
            line: the line, counted from 1.
            column: the column, counted from 1.
        """
        begin = self._line_starts[min(line, len(self._line_starts)) - 1]
        end = self._line_starts[line] - 1 if line < len(self._line_starts) else len(self.text)
        # A parser may point behind the last character of a line.
        return self.at_offset(min(begin + column - 1, max(end - 1, begin)))

    def between(self, line: int, column: int, end_line: int, end_column: int) -> Origin | None:
        """Returns the origin of a range of rendered text: the origins of all its characters, joined into one.

        Args:
            line: the line of the first character, counted from 1.
            column: the column of the first character, counted from 1.
            end_line: the line of the last character, counted from 1.
            end_column: the column after the last character, counted from 1.
        """
        starts, lines = self.starts, self._line_starts
        if not starts:
            return None
        last = len(lines)
        behind = bisect_right(starts, lines[line - 1 if line < last else last - 1] + column - 1) or 1
        end = lines[end_line - 1 if end_line < last else last - 1] + end_column - 1
        # Most ranges are within one segment; then nothing has to be joined.
        if behind == len(starts) or starts[behind] >= end:
            return self.origins[behind - 1]
        return _joined(self.origins[behind - 1 : bisect_left(starts, end)])

    def lines(self) -> Iterator[tuple[str, Origin | None]]:
        """Yields each rendered line with the origin of its first visible character."""
        for number, line in enumerate(self.text.split("\n"), start=1):
            # The indentation may come from a filter such as `indent`, and not from the line that wrote the text.
            indent = len(line) - len(line.lstrip())
            yield line, self.at(number, indent + 1) if line else None


def _joined(origins: Sequence[Origin]) -> Origin:
    """Returns one origin for a text that several lines wrote: the first origin, with the other lines as `parts`."""
    first = origins[0]
    # By span, because one line may have written several of the segments.
    sites = {origin.site.span: origin.site for origin in origins}
    sets = tuple(dict.fromkeys(site for origin in origins for site in origin.sets))
    approximate = any(origin.approximate for origin in origins)
    parts = tuple(site for span, site in sites.items() if span != first.span)
    if sets == first.sets and approximate == first.approximate and not parts:
        return first
    return Origin(first.sites, sets, approximate, parts)
