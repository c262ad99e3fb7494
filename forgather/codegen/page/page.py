"""The graph page: its content as plain data, and the HTML document.

The input is a graph, its rendered text and a function that shortens file names; the output is a structure of lists,
dicts, strings and numbers, and the document that embeds this structure. The file names on the page do not contain
absolute paths. Each line of a template is included once. `docs/graph_page.md` describes the fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from forgather.codegen.diagram import (
    Box,
    Row,
    boxes_of,
    constructor,
    flow_text,
    is_number,
    is_plain,
    kind,
    label,
    step_text,
    title,
)
from forgather.codegen.page.source_lines import RenderedLines, overridden_lines, rendered_lines
from forgather.config.anchor_names import anchor_names
from forgather.config.graph import Graph, Node, Scalar
from forgather.config.insight.blame import Blame, Writing, blame
from forgather.config.path import GraphPath
from forgather.config.rendered import RenderedText
from forgather.config.traverse import roots, shared_nodes
from forgather.config.yaml.scalar_text import scalar_text
from forgather.errors import Diagnostic
from forgather.source import Origin, Site, SourceFile, Span

MAX_LINES = 20_000
MAX_BLAMED = 50_000
_WIDEST = 2_000
_AROUND = 2


def page_data(
    graph: Graph,
    rendered: RenderedText,
    *,
    shorten: Callable[[str], str],
    config: str,
    project: str = "",
    overrides: Sequence[tuple[str, str]] = (),
    findings: Iterable[Diagnostic] = (),
) -> dict[str, Any]:
    """Returns the data of the page.

    Args:
        graph: the graph, with overrides applied.
        rendered: the rendered text of the config.
        shorten: the function that returns the short name of a file from its absolute path.
        config: the name of the config.
        project: the name of the project.
        overrides: the overrides of the command line, as pairs of graph path and YAML text.
        findings: the diagnostics about the config.
    """
    places = _Places(rendered, shorten)
    lines = RenderedLines(rendered)
    boxes = boxes_of(graph)
    numbers = rendered_lines(boxes, lines)
    writer = _BoxWriter(graph, boxes, places, lines, numbers)
    data: dict[str, Any] = {
        "config": config,
        "project": project,
        "overrides": [f"{path}={value}" for path, value in overrides],
        "boxes": writer.boxes(),
        "templates": _templates(rendered, places),
        "lines": _lines(rendered, places),
        "over": sorted(overridden_lines(boxes, lines, numbers).items()),
        "findings": [_finding(found, places) for found in findings],
    }
    # Added last: `places` collects the files, places and origins that the other parts refer to.
    return data | {"files": places.files, "places": places.places, "origins": places.origins, "sources": places.sources}


class _Places:
    """Assigns numbers to files, to places (`[file, line]`) and to origins, and stores the lines around each place."""

    def __init__(self, rendered: RenderedText, shorten: Callable[[str], str]) -> None:
        self._sources = rendered.sources
        self._shorten = shorten
        self._files: dict[str, int] = {}
        self._places: dict[tuple[str, int], int] = {}
        self._origins: dict[int, int] = {}
        self._kept: list[Origin] = []
        self.files: list[str] = []
        self.places: list[list[int]] = []
        self.origins: list[dict[str, Any]] = []

    def place_index(self, span: Span) -> int:
        key = (span.file, span.line)
        if key not in self._places:
            if span.file not in self._files:
                self._files[span.file] = len(self.files)
                self.files.append(_without_root(self._shorten(span.file)))
            self._places[key] = len(self.places)
            self.places.append([self._files[span.file], span.line])
        return self._places[key]

    def origin_index(self, origin: Origin | None) -> int | None:
        if origin is None:
            return None
        if id(origin) not in self._origins:
            # Kept, because an id can be reused after its object is freed.
            self._kept.append(origin)
            fact: dict[str, Any] = {"at": self.place_index(origin.span)}
            if origin.sites[:-1]:
                fact["via"] = self._sites(origin.sites[-2::-1])
            if origin.sets:
                fact["sets"] = self._sites(origin.sets)
            if origin.approximate:
                fact["approximate"] = True
            self._origins[id(origin)] = len(self.origins)
            self.origins.append(fact)
        return self._origins[id(origin)]

    def _sites(self, sites: tuple[Site, ...]) -> list[int]:
        return list(dict.fromkeys(self.place_index(site.span) for site in sites))

    @property
    def sources(self) -> list[list[list[Any]]]:
        """The lines around the places of each file, in groups: each group is its first line number, then its lines."""
        return [
            _runs(self._sources.get(file), sorted(line for other, line in self._places if other == file))
            for file in self._files
        ]


def _without_root(name: str) -> str:
    """Returns only the end of an absolute path, so that the page does not show folders of this machine."""
    return "…/" + "/".join(name.split("/")[-2:]) if name.startswith("/") else name


def _runs(source: SourceFile | None, wanted: list[int]) -> list[list[Any]]:
    if source is None:
        return []
    texts = source.text.split("\n")
    runs: list[list[Any]] = []
    done = 0
    for line in wanted:
        first, last = max(line - _AROUND, done + 1, 1), min(line + _AROUND, len(texts))
        if first > last:
            continue
        shown = [_cut(text) for text in texts[first - 1 : last]]
        if runs and first == done + 1:
            runs[-1].extend(shown)
        else:
            runs.append([first, *shown])
        done = last
    return runs


class _BoxWriter:
    def __init__(
        self, graph: Graph, boxes: list[Box], places: _Places, lines: RenderedLines, numbers: dict[int, int]
    ) -> None:
        self._boxes, self._places, self._lines, self._numbers = boxes, places, lines, numbers
        tops = roots(graph)
        self._anchors = {**anchor_names(graph, tops), **graph.anchors}
        self._shared = shared_nodes([node for _, node in tops])
        self._homes = {
            id(boxes[row.box]): row
            for box in boxes
            for row in box.rows
            if row.box is not None and boxes[row.box].path == (*box.path, row.step)
        }
        self._same: dict[int, int] = {}
        self._targets = len(graph.targets)
        wanted = {(*box.path, row.step) for box in boxes for row in box.rows}
        wanted |= {(*box.path, row.step, inner.step) for box in boxes for row in box.rows for inner in row.rows}
        self._blamed: dict[GraphPath, Blame] = {
            item.path: item for item in islice(blame(graph), MAX_BLAMED) if item.path in wanted
        }

    def boxes(self) -> list[dict[str, Any]]:
        return [self._box(box) for box in self._boxes]

    def _box(self, box: Box) -> dict[str, Any]:
        node = box.node
        if node is None:
            fact: dict[str, Any] = {"kind": "config", "targets": self._targets}
        else:
            home = self._homes.get(id(box))
            key = home.entry if home is not None and is_plain(node) else None
            fact = {
                "kind": kind(node),
                "title": title(node),
                "calls": constructor(node),
                "name": node.name,
                "anchor": self._anchors.get(id(node)),
                "origin": self._places.origin_index(key.origin if key else node.origin),
                "line": self._numbers.get(id(home if key else box)),
            }
        return _without_none(fact) | {"rows": [self._row(box, row, box.path) for row in box.rows]}

    def _row(self, box: Box, row: Row, path: GraphPath) -> dict[str, Any]:
        path = (*path, row.step)
        blamed = self._blamed.get(path)
        leaf = row.box is None
        fact: dict[str, Any] = {
            "key": _cut(label(row.step)),
            "step": step_text(row.step),
            "kind": None if not leaf else kind(row.node),
            "text": flow_text(row.node) if leaf else None,
            "value": _canonical_number(row.node),
            "box": row.box,
            "origin": self._places.origin_index(row.entry.origin if row.entry else row.node.origin),
            "line": self._numbers.get(id(row)),
            "alias": row.entry.alias if row.entry else None,
        }
        if leaf and id(row.node) in self._shared:
            fact |= {
                "same": self._same.setdefault(id(row.node), len(self._same)),
                "anchor": self._anchors.get(id(row.node)),
            }
        if blamed is not None:
            fact |= self._origin_facts(row, blamed.now.origin)
            fact["was"] = [self._writing(writing) for writing in blamed.was] or None
        fact["rows"] = [self._row(box, inner, path) for inner in row.rows] or None
        return _without_none(fact)

    def _origin_facts(self, row: Row, value: Origin | None) -> dict[str, Any]:
        """Returns the place of a value, and the place of its key if the key is on another line."""
        key = row.entry.origin if row.entry else None
        if value is None or key is None or key.span == value.span or is_plain(row.node):
            return {"origin": self._places.origin_index(key if is_plain(row.node) else value or key)}
        return {"now": self._places.origin_index(value)}

    def _writing(self, writing: Writing) -> dict[str, Any]:
        fact = {"text": writing.text, "origin": self._places.origin_index(writing.origin), "alias": writing.alias}
        return _without_none(fact | {"line": self._lines.find(writing.origin)})


def _lines(rendered: RenderedText, places: _Places) -> list[list[Any]]:
    found: list[list[Any]] = []
    for text, origin in islice(rendered.source_map.lines(), MAX_LINES):
        number = places.origin_index(origin)
        found.append([_cut(text)] if number is None or not text.strip() else [_cut(text), number])
    while found and not found[-1][0]:
        found.pop()
    return found


def _templates(rendered: RenderedText, places: _Places) -> list[dict[str, Any]]:
    """Returns the templates, each with the place that includes it and the number of lines that it produced."""
    wrote: dict[tuple[str, str], list[int]] = {}
    for number, (text, origin) in enumerate(rendered.source_map.lines(), start=1):
        if origin is not None and text.strip():
            wrote.setdefault((origin.span.file, origin.site.template), []).append(number)
    facts = []
    for use in rendered.templates:
        lines = wrote.get((use.file, use.name), [])
        fact = {
            "name": use.name,
            "at": places.place_index(Span(use.file, use.line)),
            "why": use.why,
            "parent": use.parent,
            "by": places.place_index(use.by) if use.by else None,
            "wrote": len(lines),
            "line": lines[0] if lines else None,
        }
        facts.append(_without_none(fact))
    return facts


def _finding(found: Diagnostic, places: _Places) -> dict[str, Any]:
    fact = {"code": found.code, "severity": str(found.severity), "message": found.message, "path": found.path,
            "hint": found.hint, "at": places.place_index(found.span) if found.span else None}  # fmt: skip
    return _without_none(fact)


def _without_none(fact: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fact.items() if value is not None}


def _canonical_number(node: Node) -> str | None:
    """Returns a number in canonical notation; None if the user wrote this notation, or if the node is no number."""
    if not isinstance(node, Scalar) or not is_number(node) or node.written is None:
        return None
    text = scalar_text(node.value)
    return text if text != node.written else None


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}…"


_HERE = Path(__file__).parent
# The files are joined to one script in this order: each file uses only definitions of the files before it.
SCRIPTS = ("model.js", "dom.js", "layout.js", "canvas.js", "objects.js", "templates.js", "text.js", "panel.js",
           "search.js", "notice.js", "main.js")  # fmt: skip
# Also control characters and surrogates, which are invisible or cannot be encoded.
_UNSAFE = re.compile("[<>&\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def page(data: Mapping[str, Any]) -> str:
    """Returns the HTML document for the data of `page_data`; the page loads nothing from the network or from files."""
    parts = {
        "title": _escaped(" · ".join(part for part in (data["config"], data["project"]) if part)),
        "style": _read("page.css"),
        "data": embedded(data),
        "script": "\n".join(_read(name) for name in SCRIPTS),
    }
    # In one pass, so that placeholders inside the inserted texts are not replaced.
    return re.sub(r"@(title|style|data|script)@", lambda mark: parts[mark[1]], _read("page.html"))


def embedded(data: Mapping[str, Any]) -> str:
    """Returns JSON that is safe in a `<script>` element.

    The JSON contains no `<` and no character that JavaScript reads as a line end.

    Example:
        >>> embedded({"text": "</script>"})
        '{"text":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(text: str) -> str:
    # Names of files may contain surrogates, which cannot be encoded.
    return text.replace("&", "&amp;").replace("<", "&lt;").encode("utf-8", "replace").decode()


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
