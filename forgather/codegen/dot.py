"""A graph in the DOT language of Graphviz.

The input is a graph; the output is text for `dot -Tsvg`. Each box appears once, even if it is used several times. Text
from the config is escaped, so that Graphviz never reads it as markup.
"""

from __future__ import annotations

from forgather.codegen.diagram import (
    Box,
    boxes_of,
    constructor,
    cut,
    flow_text,
    heading,
    kind,
    label,
    use_counts,
    visible,
)
from forgather.config.anchor_names import anchor_names
from forgather.config.graph import Graph
from forgather.config.traverse import roots

_ROWS = 24
_WIDTH = 50
_COLORS = {"singleton": "#3b76d9", "factory": "#d9732b", "partial": "#8659d1", "meta": "#c24b8a"}
_DATA = "#8391a5"
_SHARED = "#0f8f7f"
_MARKUP = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_HEAD = """\
digraph config {
  rankdir=LR
  bgcolor="transparent"
  node [shape=plain, fontname="Helvetica", fontsize=11]
  edge [color="#8391a5", arrowsize=0.6]"""


def dot(graph: Graph) -> str:
    """Returns a directed graph with one table for each box; the first edge to a box is solid, the others are dashed."""
    boxes = boxes_of(graph)
    names = anchor_names(graph, roots(graph))
    used = use_counts(boxes)
    lines = [_HEAD]
    for number, box in enumerate(boxes):
        if box.node is not None:
            name = names.get(id(box.node)) or box.node.name or ""
            lines.append(f"  n{number} [label=<{_table(box, name, shared=used[number] > 1)}>]")
    drawn: set[int] = set()
    for number, box in enumerate(boxes):
        for at, row in enumerate(box.rows if box.node is not None else ()):
            if row.box is not None:
                # A row beyond the limit has no cell, so its edge starts at the last line of the table.
                port = f":r{at}:e" if at < _ROWS else ":more:e"
                style = f' [style=dashed, color="{_SHARED}"]' if row.box in drawn else ""
                drawn.add(row.box)
                lines.append(f"  n{number}{port} -> n{row.box}:head:w{style}")
    return "\n".join([*lines, "}", ""])


def _table(box: Box, name: str, *, shared: bool) -> str:
    node = box.node
    color = _SHARED if shared else _COLORS.get(kind(node), _DATA)
    head = heading(box, name)
    what = _text(cut(constructor(node) or kind(node), _WIDTH))
    below = f"<br align='left'/><font point-size='9'>{what}</font><br align='left'/>"
    anchor = f" &amp;{_text(cut(name, _WIDTH))}" if name and name != head else ""
    rows = [f"<tr><td port='head' colspan='2' align='left'><b>{_text(cut(head, _WIDTH))}</b>{anchor}{below}</td></tr>"]
    for at, row in enumerate(box.rows[:_ROWS]):
        value = "→" if row.box is not None else _text(flow_text(row.node, _WIDTH)) or " "
        key = _text(cut(label(row.step), _WIDTH)) or " "
        rows.append(f"<tr><td align='left'>{key}</td><td port='r{at}' align='left'>{value}</td></tr>")
    if len(box.rows) > _ROWS:
        rows.append(f"<tr><td port='more' colspan='2' align='left'>and {len(box.rows) - _ROWS} more</td></tr>")
    border = f"border='{2 if shared else 1}' cellborder='0' cellspacing='0' cellpadding='3' style='rounded'"
    return f"<table {border} color='{color}'>{''.join(rows)}</table>"


def _text(text: str) -> str:
    return "".join(_MARKUP.get(char, char) for char in visible(text))
