"""Writes the table of measured equality into docs/parallelism.md.

    python scripts/write_results.py results.json

Reads the results of `pytest tests/ml/distributed --all-cells --write-results results.json`. `make test-distributed`
runs both.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PRECISIONS = ("fp64", "fp32 sgd", "fp32 adamw")
COLUMNS = (
    "strategy",
    "ranks",
    "trainings",
    "fp64, AdamW with clipping: digits",
    "fp32, SGD: norm, update",
    "fp32, AdamW with clipping: loss, norm, update",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def table(notes):
    """Returns the table: for each strategy, the worst result over all models and accumulation steps."""
    rows = defaultdict(lambda: defaultdict(list))
    for note in notes:
        strategy = f"{note['strategy']}, {note['option']}" if note["option"] else note["strategy"]
        rows[strategy, note["world_size"]][note["precision"]].append(note)
    return "\n".join([HEAD, *(_row(strategy, ranks, found) for (strategy, ranks), found in rows.items())])


def _row(strategy, ranks, found):
    double, sgd, adamw = (found.get(precision, []) for precision in PRECISIONS)
    cells = [
        strategy,
        str(ranks),
        str(len(double) + len(sgd) + len(adamw)),
        str(min((note["digits"] for note in double), default="")),
        _worst(sgd, "grad_norm", "updrel"),
        _worst(adamw, "loss", "grad_norm", "updrel"),
    ]
    return f"| {' | '.join(cells)} |"


def _worst(notes, *names):
    if not notes:
        return ""
    return ", ".join(f"{max(note[name] for note in notes):.0e}" for name in names)


def replaced(page, content):
    """Returns the page with new content between its two marks."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{content}\n{END}{rest.split(END)[1]}"


def main(*files):
    """Writes the table for one or several files of results."""
    notes = [note for file in files for note in json.loads(Path(file).read_text(encoding="utf-8"))]
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), table(notes)), encoding="utf-8")
    print(f"{len(notes)} trainings in {PAGE.relative_to(PAGE.parents[1])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
