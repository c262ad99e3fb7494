"""Rendered texts made by hand, for tests of what comes after rendering."""

from __future__ import annotations

from forgather.config.graph import Graph
from forgather.config.load import load
from forgather.config.rendered import RenderedText
from forgather.source import Origin, Site, SourceFile, SourceMap, Span

FILE = "/project/t.yaml"


def rendered(text: str, writers: dict[int, Origin] | None = None, **fields) -> RenderedText:
    """Returns `text` as a render of t.yaml in which line n was written by line n, or by `writers[n]`."""
    starts, origins, offset = [], [], 0
    for number, line in enumerate(text.split("\n"), start=1):
        starts.append(offset)
        origins.append((writers or {}).get(number) or origin(number))
        offset += len(line) + 1
    sources = {FILE: SourceFile(FILE, text)}
    return RenderedText(
        name="t.yaml", file=FILE, text=text, source_map=SourceMap(text, starts, origins), sources=sources, **fields
    )


def origin(*lines: int | tuple[int, str, str | None], approximate: bool = False) -> Origin:
    """Returns an origin; each site is a line of t.yaml, or (line, template, block)."""
    sites = [line if isinstance(line, tuple) else (line, "t.yaml", None) for line in lines]
    return Origin(
        tuple(Site(Span(f"/project/{template}", line), template, block) for line, template, block in sites),
        approximate=approximate,
    )


def graph_of(text: str) -> Graph:
    """Returns the graph of a hand-made render."""
    return load(rendered(text))
