"""`LabelMetrics` gives functions labels, predictions and probabilities by the names of their parameters."""

import functools

import numpy as np
import pytest
import sklearn.metrics
import torch
from transformers import EvalPrediction
from transformers import TrainingArguments as HFTrainingArguments

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.label_metrics import TASKS, LabelMetrics
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.fixtures import rows, tiny_llama

DRAW = np.random.default_rng(0)
SHAPES = {
    "classification": ((40, 3), lambda: DRAW.integers(0, 3, (40,))),
    "multi_label": ((40, 3), lambda: DRAW.integers(0, 2, (40, 3)).astype(np.float32)),
    "regression": ((40,), lambda: DRAW.normal(size=(40,)).astype(np.float32)),
    "token_classification": ((20, 5, 3), lambda: DRAW.integers(0, 3, (20, 5))),
    "seq2seq": ((20, 5, 3), lambda: DRAW.integers(0, 3, (20, 5))),
    "causal_lm": ((20, 5, 7), lambda: DRAW.integers(0, 7, (20, 5))),
}


def data_of(task):
    shape, labels = SHAPES[task]
    labels = labels()
    if labels.ndim == 2 and task != "multi_label":
        labels[:, -2:] = -100
        labels[0] = -100
    return DRAW.normal(size=shape).astype(np.float32), labels


def by_hand(task, logits, labels):
    """(labels, predictions, probabilities), item by item."""
    if task == "regression":
        return labels, logits, None
    if task == "multi_label":
        return labels, (logits > 0).astype(int), 1 / (1 + np.exp(-logits))
    if task == "classification":
        pairs = list(zip(labels, logits, strict=True))
    else:
        ahead = 1 if task == "causal_lm" else 0
        pairs = [
            (labels[row, place + ahead], logits[row, place])
            for row in range(labels.shape[0])
            for place in range(labels.shape[1] - ahead)
            if labels[row, place + ahead] != -100
        ]
    scores = np.stack([np.exp(scores) / np.exp(scores).sum() for _, scores in pairs])
    return np.array([label for label, _ in pairs]), scores.argmax(-1), scores


def spy(seen):
    def looks(y_true, y_pred, y_score):
        seen.extend([y_true, y_pred, y_score])
        return 0.0

    return looks


@pytest.mark.parametrize("task", TASKS)
def test_functions_get_what_counting_by_hand_gives(task):
    seen = []
    logits, labels = data_of(task)
    LabelMetrics(task, {"spy": spy(seen)})(EvalPrediction(logits, labels))
    for found, expected in zip(seen[:2], by_hand(task, logits, labels)[:2], strict=True):
        np.testing.assert_array_equal(found, expected)
    if task != "regression":
        np.testing.assert_allclose(seen[2], by_hand(task, logits, labels)[2], rtol=1e-5)


@pytest.mark.parametrize("task", ["classification", "token_classification", "causal_lm"])
def test_reduced_logits_give_the_same_metrics(task):
    logits, labels = data_of(task)
    metrics = LabelMetrics(task, {"accuracy": sklearn.metrics.accuracy_score})
    reduced = metrics.preprocess_logits_for_metrics(torch.tensor(logits), None).numpy()
    assert reduced.ndim == logits.ndim - 1
    assert metrics(EvalPrediction(logits, labels)) == metrics(EvalPrediction(reduced, labels))


def test_functions_of_scikit_learn_are_called_in_their_order():
    logits, labels = data_of("classification")
    chosen = {
        "precision": functools.partial(sklearn.metrics.precision_score, average="macro"),
        "recall": functools.partial(sklearn.metrics.recall_score, average=None),
        "auc": functools.partial(sklearn.metrics.roc_auc_score, multi_class="ovr"),
    }
    found = LabelMetrics("classification", chosen)(EvalPrediction(logits, labels))
    expected, predicted, scores = by_hand("classification", logits, labels)
    each = sklearn.metrics.recall_score(expected, predicted, average=None)
    assert found == pytest.approx(
        {
            "precision": sklearn.metrics.precision_score(expected, predicted, average="macro"),
            **{f"recall_{number}": value for number, value in enumerate(each)},
            "auc": sklearn.metrics.roc_auc_score(expected, scores, multi_class="ovr"),
        }
    )
    exchanged = sklearn.metrics.precision_score(predicted, expected, average="macro")
    assert found["precision"] != pytest.approx(exchanged)


def test_two_classes_give_the_probability_of_the_second():
    logits, labels = DRAW.normal(size=(40, 2)), DRAW.integers(0, 2, 40)
    found = LabelMetrics("classification", {"auc": sklearn.metrics.roc_auc_score})(EvalPrediction(logits, labels))
    assert found["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(labels, logits[:, 1] - logits[:, 0]))


class Summing:
    """An object as those of torchmetrics, which keep sums between evaluations and over processes."""

    def __init__(self):
        self.updates = 0
        self.distributed_available_fn = lambda: True

    def reset(self):
        self.updates = 0

    def update(self, preds, target):
        assert preds.tolist() == [1, 1]
        assert target.tolist() == [1, 0]
        self.updates += 1

    def compute(self):
        assert not self.distributed_available_fn()
        return {"a": self.updates}


def test_a_metric_object_is_reset_and_not_summed_over_processes():
    metric = Summing()
    metrics = LabelMetrics("classification", {"sum": metric})
    for _ in range(2):
        assert metrics(EvalPrediction(np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([1, 0]))) == {"sum_a": 1}
    assert metric.updates == 0


@pytest.mark.parametrize(
    ("task", "function", "message"),
    [
        ("classify", sklearn.metrics.accuracy_score, "task is 'classify'"),
        ("classification", lambda a, b: 0, r"has the parameters \(a, b\)"),
        ("classification", lambda y_true, other: 0, r"has the parameters \(y_true, other\)"),
        ("classification", functools.partial(sklearn.metrics.accuracy_score, y_pred=[1]), "has the parameters"),
        ("classification", max, "does not show its parameters"),
    ],
)
def test_what_cannot_be_called_is_refused_when_it_is_built(task, function, message):
    with pytest.raises(TrainingError, match=message) as error:
        LabelMetrics(task, {"mine": function})
    assert error.value.code == "FG874"


@pytest.mark.parametrize(
    ("task", "other"),
    [
        ("classification", "token_classification"),
        ("token_classification", "classification"),
        ("regression", "classification"),
        ("classification", "regression"),
        ("multi_label", "classification"),
    ],
)
def test_shapes_of_another_task_are_refused(task, other):
    logits, labels = data_of(other)
    with pytest.raises(TrainingError, match="does not fit the task") as error:
        LabelMetrics(task, {"spy": spy([])})(EvalPrediction(logits, labels))
    assert error.value.code == "FG875"


def test_a_language_model_is_evaluated_without_its_logits(tmp_path):
    metrics = LabelMetrics("causal_lm", {"accuracy": sklearn.metrics.accuracy_score})
    model, data = tiny_llama(), rows(6)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True), eval_dataset=data, compute_metrics=metrics)
    found = trainer.evaluate()["eval_accuracy"]
    assert trainer.predict(data).predictions.ndim == 2
    whole = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True)).predict(data)
    expected, predicted, _ = by_hand("causal_lm", whole.predictions, whole.label_ids)
    assert found == pytest.approx((expected == predicted).mean())


def test_transformers_own_trainer_gives_the_same_number(tmp_path):
    metrics = LabelMetrics("causal_lm", {"accuracy": sklearn.metrics.accuracy_score})
    model, data = tiny_llama(), rows(6)
    ours = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True), eval_dataset=data, compute_metrics=metrics)
    theirs = HFTrainer(
        model,
        HFTrainingArguments(str(tmp_path), use_cpu=True, report_to="none"),
        eval_dataset=data,
        compute_metrics=metrics,
    )
    assert theirs.evaluate()["eval_accuracy"] == ours.evaluate()["eval_accuracy"]
    assert theirs.predict(data).predictions.ndim == 2


def test_scores_in_place_of_classes_are_refused():
    metrics = LabelMetrics("classification", {"accuracy": sklearn.metrics.accuracy_score})
    with pytest.raises(TrainingError, match="does not fit the task"):
        metrics(EvalPrediction(np.array([0.9, 0.1]), np.array([1, 0])))
    metrics = LabelMetrics("classification", {"auc": sklearn.metrics.roc_auc_score})
    with pytest.raises(TrainingError, match="does not fit the task"):
        metrics(EvalPrediction(np.array([1, 0]), np.array([1, 0])))


def test_padding_between_batches_is_left_out_whatever_the_loss_ignores():
    metrics = LabelMetrics("token_classification", {"accuracy": sklearn.metrics.accuracy_score}, ignore_index=0)
    found = metrics(EvalPrediction(np.array([[1, 2, -100], [1, 2, 1]]), np.array([[1, 2, -100], [2, 0, 1]])))
    assert found == {"accuracy": pytest.approx(3 / 4)}
