"""A graph as a Mermaid flowchart, which GitHub and other sites render.

The input is a graph; the output is text. Each box appears once, even if it is used several times. Text from the config
is escaped, so that it cannot end a label or be read as markup. Plain values are lines in the label of their box, up to
a limit.
"""

from __future__ import annotations

import re

from forgather.codegen.diagram import Box, Row, boxes_of, cut, flow_text, heading, kind, label, use_counts, visible
from forgather.config.anchor_names import anchor_names
from forgather.config.graph import Graph
from forgather.config.traverse import roots

MAX_TEXT = 50_000
MAX_EDGES = 500
_LINES = 6
_WIDTH = 44
# Besides markup: `__` is bold in Markdown, and a digit, `+` or `-` at the start begins a list.
_SPECIAL = re.compile(r"[^\w .,:/()+=@!~'\[\]…-]|_(?=_)|^[\d+-]")
_CLASSES = """\
  classDef singleton stroke:#3b76d9
  classDef factory stroke:#d9732b
  classDef partial stroke:#8659d1
  classDef data stroke:#8391a5
  classDef shared stroke:#0f8f7f,stroke-width:3px"""


def mermaid(graph: Graph) -> str:
    """Returns a flowchart from left to right; the first arrow to a box is solid, the others are dotted."""
    boxes = boxes_of(graph)
    names = anchor_names(graph, roots(graph))
    used = use_counts(boxes)
    drawn: set[int] = set()
    lines = ["flowchart LR"]
    for number, box in enumerate(boxes):
        if box.node is not None:
            name = names.get(id(box.node)) or box.node.name or ""
            kinds = kind(box.node) if kind(box.node) in ("singleton", "factory", "partial") else "data"
            shape = f'n{number}["{_label(box, name)}"]:::{kinds}'
            lines.append(f"  {shape}")
    for number, box in enumerate(boxes):
        for row in box.rows if box.node is not None else ():
            if row.box is not None:
                arrow = "-.->" if row.box in drawn else "-->"
                drawn.add(row.box)
                lines.append(f'  n{number} {arrow}|"{_text(label(row.step))}"| n{row.box}')
    shared = [f"n{number}" for number in sorted(used) if used[number] > 1]
    lines.append(_CLASSES)
    if shared:
        lines.append(f"  class {','.join(shared)} shared")
    return "\n".join(lines) + "\n"


def too_large(text: str) -> str | None:
    """Returns the limit of Mermaid that a flowchart exceeds, as text; None if Mermaid renders the flowchart.

    Source:
        `maxTextSize` and `maxEdges` of Mermaid's configuration; sites such as GitHub use their defaults.
    """
    # Labels do not contain these texts: `>` and `|` are escaped there.
    edges = text.count("-->|") + text.count("-.->|")
    if len(text) > MAX_TEXT:
        return f"{len(text):,} characters, and Mermaid draws {MAX_TEXT:,} unless configured otherwise (maxTextSize)"
    if edges > MAX_EDGES:
        return f"{edges:,} arrows, and Mermaid draws {MAX_EDGES} unless configured otherwise (maxEdges)"
    return None


def _label(box: Box, name: str) -> str:
    head = cut(heading(box, name), _WIDTH)
    if name and name != head:
        head += f" ({cut(name, _WIDTH)})"
    plain = [row for row in box.rows if row.box is None]
    parts = [_text(head), *(_text(_pair(row)) for row in plain[:_LINES])]
    if len(plain) > _LINES:
        parts.append(f"and {len(plain) - _LINES} more")
    return "<br/>".join(parts)


def _pair(row: Row) -> str:
    return cut(f"{label(row.step)}: {flow_text(row.node, _WIDTH)}", _WIDTH)


def _text(text: str) -> str:
    """Returns the text with entities for all characters that have a meaning in Markdown, HTML or Mermaid."""
    return _SPECIAL.sub(lambda match: f"#{ord(match[0])};", visible(text))
