"""The grid of lengths by numbers of rows on the page of a plan, and the longest rows that fit.

Takes a plan as data; gives HTML, which is empty if no other lengths were requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgather.ml.report.html_text import html_text
from forgather.planner.grid import longest_sentence, reasons, table_of
from forgather.planner.memory_plan import format_size

VERDICTS = {"fits": "good", "may fit": "fair", "does not fit": "bad"}
"""The class of each verdict in the style of the page."""


def lengths_html(found: Mapping[str, Any]) -> str:
    """Returns the grid of lengths by numbers of rows, each cell in the color of its verdict, and the longest rows.

    Args:
        found: what `fgcli plan --json` prints, with `grid` and `longest`.
    """
    grid, longest = found.get("grid"), found.get("longest")
    notes = [longest_sentence(longest)] if longest is not None else []
    table = ""
    if grid is not None:
        notes += reasons(grid)
        columns, cells = table_of(grid)
        heads = "".join(f"<th>{head}</th>" for head in ("tokens", *columns))
        lines = "".join(f"<tr><th>{length:,}</th>{''.join(map(_length_cell, line))}</tr>" for length, line in cells)
        table = f'<table class="lengths"><tr>{heads}</tr>{lines}</table>'
    words = "".join(f'<p class="note">{html_text(note)}</p>' for note in notes)
    return table + words


def _length_cell(cell: Mapping[str, Any]) -> str:
    if cell["peak_bytes"] is None:
        return "<td>-</td>"
    verdict, speed = cell["verdict"], cell["tokens_per_second"]
    small = "" if speed is None else f"<small>{speed['low']:,.0f} to {speed['high']:,.0f}</small>"
    kind = f' class="{VERDICTS[verdict]}" title="{verdict}"' if verdict else ""
    return f"<td{kind}><b>{format_size(cell['peak_bytes'])}</b>{small}</td>"
