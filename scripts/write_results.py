"""Writes the tables of measured equality into docs/parallelism.md.

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
FIGURES = (
    "fp64, AdamW with clipping: digits",
    "fp32, SGD: norm, update",
    "fp32, AdamW with clipping: loss, norm, update",
)
RING_DATA = "one document"
"""The option of data whose documents see one another, which every training on a ring has."""


def tables(notes):
    """Returns two tables of the worst results: of each strategy alone, and of each further setting."""
    strategies = defaultdict(lambda: defaultdict(list))
    settings = defaultdict(lambda: defaultdict(list))
    for note in notes:
        option = note["option"].removeprefix(RING_DATA).removeprefix(", ")
        place = settings[option] if option else strategies[note["strategy"], note["world_size"]]
        place[note["precision"]].append(note)
    first = [_row((strategy, str(ranks)), found) for (strategy, ranks), found in strategies.items()]
    second = [_row((option, _strategies(found)), found) for option, found in settings.items()]
    return "\n\n".join(
        [
            "\n".join([_head("strategy", "ranks"), *first]),
            "Further settings, each with the strategies and numbers of ranks under which it was compared:",
            "\n".join([_head("setting", "strategies"), *second]),
        ]
    )


def _head(*names):
    columns = (*names, "trainings", *FIGURES)
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def _strategies(found):
    ranks = defaultdict(set)
    for notes in found.values():
        for note in notes:
            ranks[note["strategy"]].add(note["world_size"])
    return "; ".join(f"{name} on {' and '.join(map(str, sorted(sizes)))}" for name, sizes in ranks.items())


def _row(names, found):
    double, sgd, adamw = (found.get(precision, []) for precision in PRECISIONS)
    cells = [
        *names,
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
    """Writes the tables for one or several files of results."""
    notes = [note for file in files for note in json.loads(Path(file).read_text(encoding="utf-8"))]
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), tables(notes)), encoding="utf-8")
    print(f"{len(notes)} trainings in {PAGE.relative_to(PAGE.parents[1])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
