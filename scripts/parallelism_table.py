"""Writes the tables of `docs/parallelism.md` from the compatibility matrix (`forgather/ml/matrix.json`).

Replaces the text between the marks `<!-- matrix -->` and `<!-- end of matrix -->` of the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from forgather.compatibility import Cell, Matrix, read_matrix

PAGE = Path(__file__).resolve().parents[1] / "docs" / "parallelism.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
_WORDS = {"setting": "equal", "near": "equal but for rounding"}
_OF_A_STRATEGY = (
    ("accumulation", "several"), ("accumulation", "scheduled"), ("precision", "bfloat16"), ("precision", "float16"),
    ("compile", "yes"), ("packing", "fixed"), ("packing", "flattened"), ("tied", "yes"), ("offload", "weights"),
    ("logits", "chunked"),
    ("reentrant", "yes"), ("optimizer", "adafactor"), ("optimizer", "matrix"), ("adapter", "lora"),
    ("adapter", "dora"),
)  # fmt: skip
_OF_A_SCHEDULE = (
    ("replicas", "all-reduce"), ("replicas", "fsdp2"), ("replicas", "fsdp2 with resharding"),
    ("replicas", "hybrid shards"), ("replicas", "ddp"), ("tensor", "yes"), *_OF_A_STRATEGY[:-5], ("frozen", "stage"),
    *_OF_A_STRATEGY[-4:],
)  # fmt: skip


def tables(matrix: Matrix) -> str:
    """Returns the tables and their notes."""
    notes: list[str] = []
    strategies = [name for name in matrix.axes["strategy"].values if name not in ("pipeline", "zero")]
    schedules = list(matrix.axes["schedule"].values)
    parts = [
        _table(matrix, "strategy", strategies, _OF_A_STRATEGY, {}, notes),
        _table(matrix, "schedule", schedules, _OF_A_SCHEDULE, {"strategy": "pipeline"}, notes),
    ]
    parts.append(_further(matrix, [cell for cell in matrix.cells if not _is_in_a_table(cell)], notes))
    parts.append("\n".join(f"{number}. {note}" for number, note in enumerate(notes, start=1)) + "\n")
    return "\n".join(parts)


def _is_in_a_table(cell: Cell) -> bool:
    """Returns whether one of the two tables with rows and columns contains the cell."""
    of_a_strategy = {"strategy", *(name for name, _ in _OF_A_STRATEGY)}
    of_a_schedule = {"schedule", *(name for name, _ in _OF_A_SCHEDULE)}
    axes = set(cell.where)
    if cell.where.get("strategy") == ("pipeline",):
        return len(axes) == 2 and axes - {"strategy"} <= of_a_schedule
    return len(axes) == 2 and (axes <= of_a_strategy or axes <= of_a_schedule)


def _further(matrix: Matrix, cells: list[Cell], notes: list[str]) -> str:
    """Returns a table of the cells that a row and a column do not determine."""
    lines = ["| other combinations | verdict |", "|---|---|"]
    for cell in cells:
        axes = [" or ".join(matrix.axes[axis].values[value] for value in among) for axis, among in cell.where.items()]
        lines.append(f"| {' + '.join(axes)} | {_verdict(cell, notes)} |")
    return "\n".join(lines) + "\n"


def _table(
    matrix: Matrix,
    axis: str,
    rows: list[str],
    columns: tuple[tuple[str, str], ...],
    around: dict[str, str],
    notes: list[str],
) -> str:
    """Returns a table with a column for each value of `axis` and a row for each value of another axis."""
    titles = [matrix.axes[axis].title, *rows]
    words = matrix.axes[axis].values
    lines = [
        "| " + " | ".join([titles[0], *(words[row] for row in rows)]) + " |",
        "|" + "---|" * (len(rows) + 1),
    ]
    for name, value in columns:
        cells = [_verdict(matrix.cell({**around, axis: row, name: value}), notes) for row in rows]
        lines.append("| " + " | ".join([matrix.axes[name].values[value], *cells]) + " |")
    return "\n".join(lines) + "\n"


def _verdict(cell: Cell | None, notes: list[str]) -> str:
    if cell is None:
        return "equal"
    note = _note(cell)
    if note not in notes:
        notes.append(note)
    return f"{_WORDS.get(cell.verdict, cell.verdict)} ({notes.index(note) + 1})"


def _note(cell: Cell) -> str:
    # The table is about any value; a message shows the one that is set, after the name of its setting.
    reason = re.sub(r" \{args\.\w+\}", "", cell.reason.replace("{args.schedule_class}", "this schedule"))
    if cell.verdict == "setting":
        return f"Equal with `{cell.instead}`, which is set for you: {reason}."
    return f"{reason}. Instead: {cell.instead}."


def page_with(text: str, written: str) -> str:
    """Returns a page with its tables replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), tables(read_matrix())), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
