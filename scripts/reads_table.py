"""Measures how often a step of each strategy reads a tensor and how many collectives it needs, and writes the table.

    python scripts/reads_table.py             # measures, and writes tests/ml/distributed/reads.json and the page
    python scripts/reads_table.py --page      # writes the table of docs/parallelism.md from the JSON file alone

Replaces the text between the marks `<!-- reads -->` and `<!-- end of reads -->` of the page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

PAGE = ROOT / "docs" / "parallelism.md"
BEGIN, END = "<!-- reads -->\n", "<!-- end of reads -->\n"


def table(rows: dict[str, dict[str, float]]) -> str:
    """Returns the table of the page."""
    lines = [
        "| strategy | reads of a step | reads in transformers' mask | collectives of a step | beyond its engine |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        figures = [row[key] for key in ("reads", "reads of the mask", "collectives", "beyond the engine")]
        lines.append(f"| {name} | {' | '.join(f'{figure:g}' for figure in figures)} |")
    return "\n".join(lines) + "\n"


def page_with(text: str, shown: str) -> str:
    """Returns the page with another table."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n" + shown + "\n" + END + rest.split(END)[1]


def main() -> None:
    """Measures, unless only the page is to be written, and writes."""
    from tests.ml.distributed.read_cells import CELLS, EXPECTED, expected, measure

    if "--page" not in sys.argv[1:]:
        rows = {cell.name: measure(cell) for cell in CELLS}
        EXPECTED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), table(expected())), encoding="utf-8")


if __name__ == "__main__":
    main()
