"""Records what seqeval says about rows of tags, which `forgather.ml.entity_metrics` must say too.

The rows are drawn at random from tags in several schemes, wrong orders included, since a model writes those too. Run
`make oracles`, which installs seqeval into a folder of its own; it needs the package index.

Usage:
    PYTHONPATH=FOLDER python scripts/oracles/entity_metrics.py        writes tests/ml/recorded/entity_metrics.json
"""

import json
import random
import warnings
from importlib.metadata import version
from pathlib import Path

from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

RECORD = Path(__file__).parents[2] / "tests/ml/recorded/entity_metrics.json"
SCHEMES = {"IOB2": "BI", "IOBES": "BIES", "nothing": ""}


def rows(draw, marks, count):
    tags = ["O", *(f"{mark}-{kind}" for mark in marks for kind in ("PER", "LOC", "A-B"))]
    return [[draw.choice(tags) for _ in range(draw.randint(1, 9))] for _ in range(count)]


def case(draw, marks):
    truth = rows(draw, marks, 12)
    # Half of the tags are right, so that entities agree.
    other = rows(draw, marks, 12)
    guess = [
        [tag if draw.random() < 0.6 else draw.choice(changed) for tag in row]
        for row, changed in zip(truth, other, strict=True)
    ]
    options = {"zero_division": 0}
    return {
        "labels": truth,
        "predictions": guess,
        "entities": [get_entities(row) for row in guess],
        "precision": float(precision_score(truth, guess, **options)),
        "recall": float(recall_score(truth, guess, **options)),
        "f1": float(f1_score(truth, guess, **options)),
        "accuracy": float(accuracy_score(truth, guess)),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    draw = random.Random(13)
    cases = [{"scheme": name, **case(draw, marks)} for name, marks in SCHEMES.items() for _ in range(4 if marks else 1)]
    RECORD.write_text(json.dumps({"seqeval": version("seqeval"), "cases": cases}) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases in {RECORD}")
