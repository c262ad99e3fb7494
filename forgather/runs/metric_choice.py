"""Which metric compares runs, and which of its values is better.

The input is what the runs recorded; the output is a `MetricChoice`.

The metric is the one that the user names; else `metric_for_best_model`, if the runs agree about it; else `eval_loss`,
another loss of an evaluation, another metric of an evaluation, `loss`, any other metric with a direction. At least half
of the runs must have it.

Its direction is what the user says; else `greater_is_better`, if the runs recorded it for this metric; else it follows
from the name: losses, errors, perplexities, times and memory are better if they are lower; accuracies, scores, rewards
and speeds are better if they are higher. For any other name, no value is called the best, unless the user chooses the
metric: then it is better if it is higher, as in transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from forgather.errors import ProjectError, nearest

_LOWER = re.compile(
    r"(^|[_/])(\w*loss|perplexity|ppl|error|err|wer|cer|mse|mae|rmse|nll|bpc|bpb|time|runtime|seconds|bytes)$|^memory_"
)
_HIGHER = re.compile(
    r"(^|[_/])(acc|accuracy|accuracies|f1|precision|recall|auc|roc_auc|bleu|sacrebleu|rouge\w*|meteor|exact_match|score|reward"
    r"|rewards|margin|margins|win_rate|pearson|spearmanr?|matthews\w*|r2|per_second|mfu)$"
)
_SPEED_OR_COST = re.compile(r"(time|seconds|bytes|per_second|mfu)$|^memory_")
_LISTED = 9


@dataclass(frozen=True, kw_only=True)
class MetricChoice:
    """The metric by which runs are compared.

    Args:
        name: the name of the metric.
        is_higher_better: whether a higher value is better.
        why: why it is this metric, as part of a sentence.
    """

    name: str
    is_higher_better: bool
    why: str

    @property
    def direction(self) -> str:
        """The direction in words."""
        return "higher is better" if self.is_higher_better else "lower is better"


def is_higher_better(name: str) -> bool | None:
    """Returns whether a higher value of a metric is better; None if its name does not say so.

    Example:
        >>> [is_higher_better(name) for name in ("eval_loss", "eval_f1", "tokens_per_second", "grad_norm")]
        [False, True, True, None]
    """
    if _LOWER.search(name):
        return False
    return True if _HIGHER.search(name) else None


def is_cost(name: str) -> bool:
    """Returns whether a metric is a speed, a time or memory, which do not say how good a model is."""
    return _SPEED_OR_COST.search(name) is not None


def choose_metric(
    metrics: Sequence[Sequence[str]],
    arguments: Sequence[Mapping[str, Any]],
    *,
    wanted: str | None = None,
    best: str | None = None,
) -> MetricChoice | None:
    """Returns the metric that compares runs; None if at least half of the runs have none in common.

    Args:
        metrics: the names of the metrics of each run.
        arguments: the training arguments of each run, as far as they are recorded.
        wanted: the metric that the user names, or None.
        best: "min" or "max" if the user says which value is better, else None.

    Raises:
        ProjectError: FG541 if no run has the wanted metric.
    """
    counts: dict[str, int] = {}
    for names in metrics:
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    recorded = _recorded(arguments)
    if wanted is not None:
        name, why = _named(wanted, counts), "you named it"
    else:
        half = [name for name, count in counts.items() if count >= max(2, len(metrics) / 2)]
        found = _preferred(half, recorded)
        if found is None:
            return None
        name, why = found
    known = recorded.get(name)
    if best is not None:
        return MetricChoice(name=name, is_higher_better=best == "max", why=why)
    direction = known if known is not None else is_higher_better(name)
    return MetricChoice(name=name, is_higher_better=True if direction is None else direction, why=why)


def _recorded(arguments: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Returns the metrics by which the runs chose their best model, with their direction, if the runs agree."""
    found: dict[str, set[bool]] = {}
    for given in arguments:
        name, greater = given.get("metric_for_best_model"), given.get("greater_is_better")
        if isinstance(name, str) and isinstance(greater, bool):
            found.setdefault(name if name.startswith("eval_") else f"eval_{name}", set()).add(greater)
    return {name: directions.pop() for name, directions in found.items() if len(directions) == 1}


def _named(wanted: str, counts: Mapping[str, int]) -> str:
    if wanted in counts:
        return wanted
    hint = nearest(wanted, list(counts))
    if hint is None:
        more = f" and {len(counts) - _LISTED} more" if len(counts) > _LISTED else ""
        hint = (
            f"metrics of these runs: {', '.join(list(counts)[:_LISTED])}{more}" if counts else "they logged no metric"
        )
    raise ProjectError(f"none of these runs has a metric {wanted!r}", code="FG541", hint=hint, found=wanted)


def _preferred(names: Sequence[str], recorded: Mapping[str, bool]) -> tuple[str, str] | None:
    own = [name for name in recorded if name in names]
    if len(own) == 1:
        return own[0], "it is metric_for_best_model of these runs"
    quality = [name for name in names if is_higher_better(name) is not None and not is_cost(name)]
    evaluated = [name for name in quality if name.startswith("eval_")]
    order = [
        *(name for name in evaluated if name == "eval_loss"),
        *(name for name in evaluated if name.endswith("loss")),
        *evaluated,
        *(name for name in quality if name == "loss"),
        *quality,
    ]
    if not order:
        return None
    return order[0], "it is measured on evaluation rows" if order[0] in evaluated else "these runs share no evaluation"


def mean_of(values: Sequence[float]) -> float:
    """Returns the mean of finite values of a metric, whose sum may be too large for a float."""
    try:
        return fmean(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def stdev_of(values: Sequence[float]) -> float:
    """Returns the sample standard deviation of at least two finite values; infinity if it is too large for a float."""
    try:
        return stdev(values)
    except OverflowError:
        return 8 * stdev([value / 8 for value in values])
