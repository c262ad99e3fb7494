"""Metrics of named entities are those that seqeval gives, which `make oracles` records."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import EvalPrediction

from forgather.errors import TrainingError
from forgather.ml.entity_metrics import EntityMetrics, entities

RECORD = json.loads((Path(__file__).parent / "recorded/entity_metrics.json").read_text())


def padded(rows, names):
    longest = max(map(len, rows))
    return np.array([[names.index(tag) for tag in row] + [-100] * (longest - len(row)) for row in rows])


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: case["scheme"])
def test_entities_and_metrics_are_those_of_seqeval(case):
    names = sorted({tag for row in case["labels"] + case["predictions"] for tag in row})
    labels, guesses = padded(case["labels"], names), padded(case["predictions"], names)

    found = EntityMetrics(names)(EvalPrediction(guesses, labels))

    assert [[tuple(one) for one in row] for row in case["entities"]] == [
        [tuple(one) for one in entities(row)] for row in case["predictions"]
    ]
    assert found == pytest.approx({name: case[name] for name in ("precision", "recall", "f1", "accuracy")}, abs=1e-12)
    # Words that are left out, such as the later tokens of a word, change nothing wherever they are.
    spread = [np.insert(of, [0, 1], -100, axis=1) for of in (guesses, labels)]
    spread[0][:, 0] = 0
    assert found == EntityMetrics(names)(EvalPrediction(*spread))


def test_an_entity_with_another_end_is_wrong_although_most_of_its_tags_are_right():
    names = ["O", "B-A", "I-A"]
    truth, guess = np.array([[1, 2, 2, 0]]), np.array([[1, 2, 0, 0]])

    assert {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 0.75} == EntityMetrics(names)(
        EvalPrediction(guess, truth)
    )


@pytest.mark.parametrize("tag", ["NOUN", "B", "I-", "X-PER", "B_PER", ""])
def test_tags_of_another_kind_are_refused(tag):
    with pytest.raises(TrainingError, match="FG953"):
        EntityMetrics(["O", "B-PER", tag])


def test_predictions_of_rows_are_refused():
    with pytest.raises(TrainingError, match="FG875"):
        EntityMetrics(["O", "B-PER"])(EvalPrediction(np.zeros((2, 2)), np.zeros(2, dtype=int)))
