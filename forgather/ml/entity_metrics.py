"""Metrics of named entities: precision, recall and F1 of whole entities, with the meaning of seqeval.

Takes the tags of words as class numbers; gives numbers that count entities, not words. An entity is correct if its
kind, its first word and its last word are those of the labels. The tags are written in the scheme IOB2 ("B-PER",
"I-PER", "O") or one that extends it by the tags of a last word ("E-") or a single word ("S-").

Shapes:
    N rows, T positions, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from forgather.errors import TrainingError
from forgather.ml.data.tagged import is_entity_tag
from forgather.ml.losses import IGNORE_INDEX

_OUTSIDE = "O"


class Entity(NamedTuple):
    """An entity of a row: its kind, and its first and last word."""

    kind: str
    first: int
    last: int


class EntityMetrics:
    """Computes precision, recall and F1 of named entities, and the accuracy of tags.

    The numbers are those of `seqeval` in its default mode, over all kinds of entities together (micro average). In this
    mode, an entity that begins with "I-" is one too.

    Args:
        labels: the names of the tags in the order of their numbers, as `class_names` returns them.

    Raises:
        TrainingError: FG953 if the tags are not those of entities.

    Source:
        seqeval.metrics.sequence_labeling, `precision_score`, `recall_score` and `f1_score` with `zero_division: 0`, as
        `run_ner.py` of transformers reports them.

    Example:
        >>> from transformers import EvalPrediction
        >>> compute = EntityMetrics(["O", "B-PER", "I-PER"])
        >>> compute(EvalPrediction(np.array([[1, 2, 0]]), np.array([[1, 2, -100]])))
        {'precision': 1.0, 'recall': 1.0, 'f1': 1.0, 'accuracy': 1.0}
    """

    def __init__(self, labels: Sequence[str]) -> None:
        wrong = [tag for tag in labels if not is_entity_tag(tag)]
        if wrong:
            raise TrainingError(
                f"the tag {wrong[0]!r} is not one of a named entity",
                code="FG953",
                hint='tags of entities are O, B-... and I-...; for other tags set ns.tags = "words" in '
                "[config_metadata], which counts words, or take LabelMetrics with the task token_classification",
            ).about("compute_metrics.labels")
        self._labels = list(labels)

    def preprocess_logits_for_metrics(self, logits: Any, labels: Any) -> Tensor:
        """Returns the classes of a batch, which are less than the logits.

        Args:
            logits: the logits, or a tuple of outputs with the logits first.
            labels: the labels; they are not used.

        Shapes:
            logits: (N, T, C). Returns (N, T).
        """
        found: Tensor = logits[0] if isinstance(logits, tuple | list) else logits
        return found.argmax(-1)

    def __call__(self, prediction: Any) -> dict[str, float]:
        """Returns the metrics of an evaluation set.

        Args:
            prediction: a `transformers.EvalPrediction` with class numbers or logits, and labels in which -100 marks the
                positions that are left out.

        Raises:
            TrainingError: FG875 if predictions and labels have different shapes.
        """
        classes, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
        classes = classes.argmax(-1) if classes.ndim == labels.ndim + 1 else classes
        if classes.shape != labels.shape or labels.ndim != 2:
            raise TrainingError(
                f"the predictions have the shape {classes.shape} and the labels {labels.shape}, which are not tags",
                code="FG875",
                hint="take EntityMetrics with the rows of tokenize_tagged, or another compute_metrics",
            ).about("compute_metrics")
        correct = found = wanted = 0
        for row, truth in zip(classes, labels, strict=True):
            valid = truth != IGNORE_INDEX
            guessed, true = (set(entities([self._labels[tag] for tag in tags[valid]])) for tags in (row, truth))
            correct, found, wanted = correct + len(guessed & true), found + len(guessed), wanted + len(true)
        valid = labels != IGNORE_INDEX
        precision, recall = (correct / count if count else 0.0 for count in (found, wanted))
        return {
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / (precision + recall) if correct else 0.0,
            "accuracy": float((classes == labels)[valid].mean()) if valid.any() else 0.0,
        }


def entities(tags: Sequence[str]) -> list[Entity]:
    """Returns the entities of a row.

    An entity ends before a word outside of entities, before one of another kind, before the tags "B" and "S", and after
    "E" and "S".

    Args:
        tags: the tag of each word.

    Example:
        >>> [tuple(one) for one in entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"])]
        [('PER', 0, 1), ('LOC', 3, 3), ('LOC', 4, 4)]
    """
    found: list[Entity] = []
    begin, before = 0, _OUTSIDE
    for place, tag in enumerate([*tags, _OUTSIDE]):
        continues = before[0] in "BI" and tag[0] in "IE" and tag[2:] == before[2:]
        if before != _OUTSIDE and not continues:
            found.append(Entity(before[2:], begin, place - 1))
        if not continues:
            begin = place
        before = tag
    return found
