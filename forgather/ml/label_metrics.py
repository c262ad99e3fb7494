"""`LabelMetrics`: a `compute_metrics` that is built in a config from functions of labels and predictions.

The functions are those of scikit-learn, functions and metrics of torchmetrics, and the user's own. The task determines
what they get: classes, probabilities or values, without ignored labels. Each function gets what the names of its
parameters ask for, so the order of its arguments cannot be mixed up.

Shapes:
    N rows, T positions, C classes, L labels that are not ignored.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgather.errors import TrainingError, nearest
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.losses import IGNORE_INDEX

TASKS = ("classification", "multi_label", "regression", "token_classification", "seq2seq", "causal_lm")

_LABELS = ("y_true", "target", "targets", "labels", "references")
_PREDICTIONS = ("y_pred", "preds", "predictions")
_SCORES = ("y_score", "y_prob", "y_proba")


class LabelMetrics:
    """Computes metrics from the labels and predictions of an evaluation set.

    Args:
        task: what the model predicts. "classification": one of C classes for each row. "multi_label": C independent
            yes-or-no labels for each row. "regression": one number or several numbers for each row.
            "token_classification": one of C classes for each position. "causal_lm": the next token of each position.
            "seq2seq": the token at each position of a target, after the true ones before it (teacher forcing).
        functions: the functions by the name of the metric. A function gets labels as the parameter `y_true`, `target`,
            `targets`, `labels` or `references`, predictions as `y_pred`, `preds` or `predictions`, and probabilities as
            `y_score`, `y_prob` or `y_proba`. A metric object of torchmetrics gets (predictions, labels).
        ignore_index: the label of rows or positions that are left out.

    Raises:
        TrainingError: FG874 if the task is unknown, or if a function has no parameters with these names.

    Example:
        >>> def accuracy(y_true, y_pred):
        ...     return (y_true == y_pred).mean()
        >>> from transformers import EvalPrediction
        >>> logits = np.array([[0.1, 0.9], [0.8, 0.2]])
        >>> LabelMetrics("classification", {"accuracy": accuracy})(EvalPrediction(logits, np.array([1, 1])))
        {'accuracy': 0.5}
    """

    def __init__(
        self, task: str, functions: Mapping[str, Callable[..., Any]], *, ignore_index: int = IGNORE_INDEX
    ) -> None:
        refuse_wrong_values("label_metrics:LabelMetrics", locals())
        if task not in TASKS:
            raise TrainingError(
                f"task is {task!r}", code="FG874", hint=nearest(str(task), TASKS) or f"one of: {', '.join(TASKS)}"
            ).about("compute_metrics.task")
        self.task = task
        self.ignore_index = ignore_index
        self._calls = {name: _Call(name, function) for name, function in functions.items()}
        self._needs_scores = any(call.scores for call in self._calls.values())

    def preprocess_logits_for_metrics(self, logits: Any, labels: Any) -> Tensor:
        """Returns what the metrics need of the logits of a batch, which is less than the logits.

        Args:
            logits: the logits, or a tuple of outputs with the logits first.
            labels: the labels; they are not used.

        Shapes:
            logits: (N, C), (N, T, C) or (N,). Returns (N,), (N, T) or the shape of the logits.
        """
        found: Tensor = logits[0] if isinstance(logits, tuple | list) else logits
        if self._needs_scores or self.task in ("multi_label", "regression"):
            return found
        return found.argmax(-1)

    def __call__(self, prediction: Any) -> dict[str, float]:
        """Returns the metrics of an evaluation set by name.

        A function that returns several numbers gives one metric for each: `name_0`, `name_1`, or `name_key` for the
        keys of a mapping.

        Args:
            prediction: a `transformers.EvalPrediction`, whose predictions are logits, or what
                `preprocess_logits_for_metrics` returned.

        Raises:
            TrainingError: FG875 if the shapes of predictions and labels do not fit the task.
        """
        scores = prediction.predictions
        scores = np.asarray(scores[0] if isinstance(scores, tuple | list) else scores)
        labels = np.asarray(
            prediction.label_ids[0] if isinstance(prediction.label_ids, tuple) else prediction.label_ids
        )
        given = self._aligned(scores, labels)
        metrics: dict[str, float] = {}
        for name, call in self._calls.items():
            metrics |= _named(name, call(*given))
        return metrics

    def _aligned(self, scores: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Returns (labels, predictions, probabilities) of everything that is not ignored.

        Shapes:
            scores: (N, ...), labels: (N, ...). Returns (L,), (L,) and (L, C) arrays, or (N, C) for "multi_label".
        """
        if self.task == "regression":
            if scores.shape != labels.shape and scores.shape == (*labels.shape, 1):
                scores = scores[..., 0]
            self._require(scores.shape == labels.shape, scores, labels)
            return labels, scores, scores
        if self.task == "multi_label":
            self._require(scores.shape == labels.shape, scores, labels)
            return labels.astype(np.int64), (scores > 0).astype(np.int64), _sigmoid(scores)
        dims = 1 if self.task == "classification" else 2
        # Classes in place of logits are what `preprocess_logits_for_metrics` returns.
        is_reduced = scores.ndim == dims
        # Scores in place of classes would equal no label, and reduced logits have no probabilities.
        is_usable = not is_reduced or (scores.dtype.kind in "iu" and not self._needs_scores)
        whole = scores.shape if is_reduced else scores.shape[:-1]
        fits = whole == labels.shape and labels.ndim == dims and labels.dtype.kind in "iu"
        self._require(fits and is_usable, scores, labels)
        if self.task == "causal_lm":
            # The logits of a position predict the next token.
            scores, labels = scores[:, :-1], labels[:, 1:]
        # Rows that were padded to a common length have the label -100 there, whatever the loss ignores.
        valid = ~np.isin(labels, (self.ignore_index, IGNORE_INDEX))
        scores, labels = scores[valid], labels[valid]
        if is_reduced:
            return labels, scores, None
        return labels, scores.argmax(-1), _softmax(scores)

    def _require(self, fits: bool, scores: Any, labels: Any) -> None:
        if not fits:
            raise TrainingError(
                f"the predictions have the shape {scores.shape} of {scores.dtype} and the labels {labels.shape} of "
                f"{labels.dtype}, which does not fit the task {self.task!r}",
                code="FG875",
                hint=f"set another task ({', '.join(TASKS)}), or give a compute_metrics of your own",
            ).about("compute_metrics.task")


class _Call:
    """A function of the user, and the names of its parameters for labels, predictions and probabilities."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._function = function
        self.labels = self.predictions = self.scores = None
        self._is_metric = all(callable(getattr(function, part, None)) for part in ("reset", "update", "compute"))
        if self._is_metric:
            return
        names = _parameters(name, function)
        self.labels, self.predictions, self.scores = (
            next((one for one in known if one in names), None) for known in (_LABELS, _PREDICTIONS, _SCORES)
        )
        if self.labels is None or (self.predictions is None and self.scores is None):
            raise _unknown(name, f"has the parameters ({', '.join(names)})")

    def __call__(self, labels: Any, predictions: Any, scores: Any) -> Any:
        if self._is_metric:
            return self._of_torchmetrics(torch.as_tensor(predictions), torch.as_tensor(labels))
        given = {self.labels: labels, self.predictions: predictions, self.scores: scores}
        return self._function(**{name: value for name, value in given.items() if name is not None})

    def _of_torchmetrics(self, predictions: Tensor, labels: Tensor) -> Any:
        # A copy: an evaluation must not change an object of the config.
        metric: Any = copy.deepcopy(self._function)
        # Every process has all rows; torchmetrics would count them once for each process.
        metric.distributed_available_fn = _not_distributed
        metric.reset()
        metric.update(predictions, labels)
        return metric.compute()


def _not_distributed() -> bool:
    return False


def _parameters(name: str, function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise _unknown(name, "does not show its parameters") from None
    # Arguments that a `!partial` sets are not left for the evaluation.
    given = function.keywords if isinstance(function, functools.partial) else {}
    return [one.name for one in parameters if one.name not in given]


def _unknown(name: str, what: str) -> TrainingError:
    return TrainingError(
        f"the function of the metric {name!r} {what}, and none of them gets labels and predictions",
        code="FG874",
        hint="name its parameters y_true and y_pred, or y_true and y_score for probabilities",
    ).about(f"compute_metrics.functions.{name}")


def _named(name: str, found: Any) -> dict[str, float]:
    if isinstance(found, Mapping):
        return {f"{name}_{key}": float(value) for key, value in found.items()}
    values = np.asarray(found)
    if values.ndim == 0:
        return {name: values.item()}
    return {f"{name}_{number}": float(value) for number, value in enumerate(values.reshape(-1))}


def _softmax(scores: Any) -> Any:
    """Returns probabilities: of all classes, or of the second class if there are two, as scikit-learn takes them.

    Shapes:
        scores: (L, C). Returns (L, C), or (L,) for two classes.
    """
    probabilities = torch.as_tensor(scores, dtype=torch.float64).softmax(-1).numpy()
    return probabilities[:, 1] if probabilities.shape[-1] == 2 else probabilities


def _sigmoid(scores: Any) -> Any:
    return torch.as_tensor(scores, dtype=torch.float64).sigmoid().numpy()
