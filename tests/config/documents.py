"""Rendered texts made by hand, for tests of what comes after rendering."""

from __future__ import annotations

from pathlib import Path

from forgather.config.environment import ConfigEnvironment
from forgather.config.graph import Graph
from forgather.config.lint.graph_check import check_graph
from forgather.config.load import load
from forgather.config.render import render
from forgather.config.rendered import RenderedText
from forgather.errors import ForgatherError
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


def hazards(folder: Path, **files: str) -> list[str]:
    """Returns the findings about the config main.yaml of a folder, or the one error, as lines without the folder."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    try:
        text = render(ConfigEnvironment(searchpath=(str(folder),)), "main.yaml")
        graph = load(text)
    except ForgatherError as error:
        return [str(error).replace(f"{folder}/", "")]
    found = (*text.diagnostics, *graph.diagnostics, *check_graph(graph))
    return [str(finding).replace(f"{folder}/", "") for finding in found]
