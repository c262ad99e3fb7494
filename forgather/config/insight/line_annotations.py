"""The lines of a rendered config, each annotated with the values that it writes and what overrides them.

The inputs are a `RenderedText` and its graph; the output is one `Line` for each line of the text. Invariants: an
overridden line names the line that overrides it, and the overriding line names what it replaced; no line is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from forgather.config.graph import Graph, Node
from forgather.config.insight.blame import Blame, Writing, blame
from forgather.config.load import load
from forgather.config.override import override
from forgather.config.path import GraphPath
from forgather.config.rendered import RenderedText
from forgather.config.traverse import edges
from forgather.source import Origin, Site, SourceMap, Span

_LINES = "<rendered>"


@dataclass(frozen=True, slots=True)
class Note:
    """The annotation of one value on a line.

    Args:
        path: the path of the value in the graph.
        writing: the value as the line writes it.
        winner: the value that overrides this value; None if this value is effective.
        was: the values that this value replaced, nearest first; empty if this value is overridden itself.
    """

    path: GraphPath
    writing: Writing
    winner: Writing | None = None
    was: tuple[Writing, ...] = ()


@dataclass(slots=True)
class Line:
    """One line of the rendered text.

    Args:
        text: the text of the line.
        origin: the template lines that wrote the line; None if the line is empty.
        notes: the annotations of the values on the line, in order.
        counts: whether any part of the line is effective; False if all of it is inside a replaced value.
    """

    text: str
    origin: Origin | None
    notes: list[Note] = field(default_factory=list)
    counts: bool = True


def annotate(rendered: RenderedText, graph: Graph, assignments: Sequence[tuple[str, str]] = ()) -> list[Line]:
    """Returns the annotated lines of a config.

    Args:
        rendered: the rendered text.
        graph: the graph of the text, after the assignments.
        assignments: the paths and values of `--set`.
    """
    lines = [Line(text, origin) for text, origin in rendered.source_map.lines()]
    # Loading the same text with each line as its own origin gives the same graph with origins in the rendered text.
    placed = override(load(_by_line(rendered)), assignments)
    items = list(blame(graph, aliases=False))
    # Both graphs have the same structure, except for settings that `graph` replaced by others: those with an old name.
    found = {item.path: item for item in blame(placed, aliases=False)}
    pairs = [(real, found.pop(real.path)) for real in items]
    for real, here in pairs:
        _note(lines, real, here, found)
    return lines


def _by_line(rendered: RenderedText) -> RenderedText:
    starts, origins, offset = [], [], 0
    for number, line in enumerate(rendered.text.split("\n"), start=1):
        starts.append(offset)
        # Equal keys of one block would be an error; with a template per line, the later one is an override.
        origins.append(Origin((Site(Span(_LINES, number), str(number)),)))
        offset += len(line) + 1
    return replace(rendered, source_map=SourceMap(rendered.text, starts, origins), templates=())


def _note(lines: list[Line], real: Blame, here: Blame, replaced: dict[GraphPath, Blame]) -> None:
    """Annotates the lines that write one value.

    Args:
        lines: the lines of the text.
        real: the value, with its origins in the templates.
        here: the same value, with its origins in the text.
        replaced: the values of the text that the graph does not have; those that this value replaced are removed.
    """
    number = _line_of(here.now)
    if number is not None:
        lines[number - 1].notes.append(Note(real.path, real.now, was=real.was))
    places = list(here.was)
    while len(places) < len(real.was):
        parent, text = real.path[:-1], real.was[len(places)].text
        former = next(path for path, item in replaced.items() if path[:-1] == parent and item.now.text == text)
        places += [replaced[former].now, *replaced.pop(former).was]
    # The number of writings that are remembered for one value is limited.
    for writing, place in zip(real.was, places, strict=False):
        number = _line_of(place)
        if number is None:
            continue
        lines[number - 1].notes.append(Note(real.path, writing, winner=real.now))
        lines[number - 1].counts = False
        # The contents of an aliased value are still effective at their own path.
        for inner in _lines_in(place.node) if not place.through else ():
            lines[inner - 1].counts = False


def _line_of(writing: Writing) -> int | None:
    """Returns the line that writes a value; None if the value is from a merge key or from the command line."""
    place = writing.origin
    # An aliased value is written elsewhere; the line in question is that of the alias.
    if writing.through:
        place = writing.through[0] if len(writing.through) == 1 and writing.alias != "<<" else None
    return place.span.line if place is not None and place.span.file == _LINES else None


def _lines_in(node: Node) -> Iterator[int]:
    """Yields the lines that wrote a value. A nested YAML alias counts with its own line alone."""
    stack = [node]
    while stack:
        inner = stack.pop()
        if inner.origin is not None and inner.origin.span.file == _LINES:
            yield inner.origin.span.line
            yield from (site.span.line for site in inner.origin.parts)
        for _, child, entry in edges(inner):
            if entry is None or entry.alias is None:
                stack.append(child)
            elif entry.alias != "<<" and entry.origin is not None and entry.origin.span.file == _LINES:
                yield entry.origin.span.line
