"""Places in the user's files, and the map from rendered text back to them.

Takes nothing and gives the nouns that every stage carries: `Span` (a place), `Site` (a place and the
template and block it is written in), `Origin` (the chain of sites that wrote a piece of text) and
`SourceMap` (rendered text to origins). Keeps true: positions are 1-based, files are absolute paths or
`<pseudo>` names, and nothing here knows what a template or a YAML document is.
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
        file: absolute path, or a name in angle brackets (`<command line>`) where there is no file.
        line: 1-based line.
        column: 1-based column; 0 when only the line is known.
    """

    file: str
    line: int
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Site:
    """A line of a template, with the template and the block it stands in.

    Args:
        span: the place.
        template: the name under which the template was loaded (`trainers/trainer.yaml`, or the name of
            an inline sub-template).
        block: the innermost block that the line stands in; None outside any block.
    """

    span: Span
    template: str
    block: str | None = None


def variable_place(name: str) -> str:
    """Returns the pseudo file of a template variable that was given by an option of the config, or in Python."""
    return f"<variable {name}>"


def variable_of(site: Site) -> str | None:
    """Returns the template variable that was given there; None for a line of a template."""
    file = site.span.file
    return file[10:-1] if file.startswith("<variable ") else None


def option_place(name: str) -> str:
    """Returns the pseudo file of an option of the command line."""
    return f"<option {name}>"


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a piece of rendered text.

    Args:
        sites: outermost first: each include, macro call or print site, and last the line that holds the
            text itself. `super()` is transparent: it adds no site.
        sets: for text printed from an expression, the last executed `set` of each name in it.
        approximate: True where a filter took the text apart, so that `sites[-1]` is the printing line.
        parts: for text that several lines wrote, the further ones.
    """

    sites: tuple[Site, ...]
    sets: tuple[Site, ...] = ()
    approximate: bool = False
    parts: tuple[Site, ...] = ()

    @property
    def site(self) -> Site:
        """The line that holds the text itself."""
        return self.sites[-1]

    @property
    def span(self) -> Span:
        """The place of the line that holds the text itself."""
        return self.sites[-1].span


@dataclass(frozen=True)
class SourceFile:
    """Text of one file as it was read.

    Args:
        file: absolute path, or a pseudo name.
        text: decoded text, with `\\n` line ends.
    """

    file: str
    text: str

    def line(self, number: int) -> str:
        """Returns line `number` (1-based) without its line end, or "" outside the file."""
        return self._lines[number - 1] if 0 < number <= len(self._lines) else ""

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.split("\n")


@dataclass(frozen=True)
class SourceMap:
    """Maps offsets of a rendered text to origins.

    Args:
        text: the rendered text.
        starts: ascending offsets, the first one 0; segment `i` covers `starts[i]` to `starts[i + 1]`.
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
        object.__setattr__(self, "_line_starts", offsets)

    def at_offset(self, offset: int) -> Origin | None:
        """Returns the origin of the character at `offset`; None for an empty text."""
        if not self.starts:
            return None
        return self.origins[max(bisect_right(self.starts, offset) - 1, 0)]

    def at(self, line: int, column: int) -> Origin | None:
        """Returns the origin of a rendered place (both 1-based); columns past the line's end are clamped."""
        begin = self._line_starts[min(line, len(self._line_starts)) - 1]
        end = self._line_starts[line] - 1 if line < len(self._line_starts) else len(self.text)
        return self.at_offset(min(begin + column - 1, max(end - 1, begin)))

    def between(self, line: int, column: int, end_line: int, end_column: int) -> Origin | None:
        """Returns the origin of a stretch of rendered text: the first place, with all that the rest adds to it.

        Args:
            line: where it begins; as everywhere, lines and columns are 1-based.
            column: column of its first character.
            end_line: where it ends.
            end_column: column behind its last character.
        """
        starts, lines = self.starts, self._line_starts
        if not starts:
            return None
        last = len(lines)
        behind = bisect_right(starts, lines[line - 1 if line < last else last - 1] + column - 1) or 1
        end = lines[end_line - 1 if end_line < last else last - 1] + end_column - 1
        if behind == len(starts) or starts[behind] >= end:
            return self.origins[behind - 1]
        return _joined(self.origins[behind - 1 : bisect_left(starts, end)])

    def lines(self) -> Iterator[tuple[str, Origin | None]]:
        """Yields each rendered line with the origin of its first visible character."""
        for number, line in enumerate(self.text.split("\n"), start=1):
            indent = len(line) - len(line.lstrip())
            yield line, self.at(number, indent + 1) if line else None


def _joined(origins: Sequence[Origin]) -> Origin:
    """Returns one origin for a text that several wrote."""
    first = origins[0]
    sites = {origin.site.span: origin.site for origin in origins}
    sets = tuple(dict.fromkeys(site for origin in origins for site in origin.sets))
    approximate = any(origin.approximate for origin in origins)
    parts = tuple(site for span, site in sites.items() if span != first.span)
    if sets == first.sets and approximate == first.approximate and not parts:
        return first
    return Origin(first.sites, sets, approximate, parts)
