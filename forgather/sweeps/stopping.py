"""When a trial ends early, by the values that all trials have logged.

The input is the curves of the trials; the output is a decision. ASHA compares trials at rungs, steps whose ratio is
`eta`: a trial goes on if it is among the best 1 / eta of those that have reached the rung. The median rule ends a trial
whose best value is worse than the median of the other trials' running averages at the same step.

Source:
    Li et al., "A System for Massively Parallel Hyperparameter Tuning", section 3, in the variant that ends trials and
    never pauses them; Golovin et al., "Google Vizier", section 3.2.2.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from forgather.runs.metric_choice import mean_of
from forgather.sweeps.spec import EarlyTermination, Goal, Rule

Curve = Sequence[tuple[int, float]]
"""Pairs of step and value, in the order of the steps."""
_FEWEST_OTHERS = 3


def ends_early(early: EarlyTermination, goal: Goal, curves: Mapping[int, Curve], number: int) -> str | None:
    """Returns why a trial should end now, or None if it should go on.

    Args:
        early: the rule.
        goal: which values are good.
        curves: the curves of all trials that have logged something, by number.
        number: the number of the trial.
    """
    if early.rule is Rule.ASHA:
        return _asha(early, goal, curves, number)
    return _median(early, goal, curves, number)


def best_value(curve: Curve, goal: Goal, until: int | None = None) -> float | None:
    """Returns the best finite value of a curve, or None if there is none.

    Args:
        curve: the curve.
        goal: which values are good.
        until: the last step that counts, or None for all.
    """
    values = [value for step, value in curve if math.isfinite(value) and (until is None or step <= until)]
    if not values:
        return None
    return min(values) if goal is Goal.MINIMIZE else max(values)


def _asha(early: EarlyTermination, goal: Goal, curves: Mapping[int, Curve], number: int) -> str | None:
    curve = curves.get(number, ())
    last = curve[-1][0] if curve else 0
    if last < early.min_steps:
        return None
    # A trial is judged at the last rung that it has reached, so it is not ended for what it has overcome.
    rung = early.min_steps
    while rung * early.eta <= last:
        rung *= early.eta
    # A trial that has only logged values that are not finite is the worst of all.
    own = _loss(best_value(curve, goal, rung), goal)
    others = [
        _loss(best_value(other, goal, rung), goal)
        for trial, other in curves.items()
        if trial != number and other and other[-1][0] >= rung
    ]
    kept = math.ceil((len(others) + 1) / early.eta)
    if sum(loss < own for loss in others) < kept:
        return None
    return f"not among the best {kept} of {len(others) + 1} trials at step {rung}"


def _median(early: EarlyTermination, goal: Goal, curves: Mapping[int, Curve], number: int) -> str | None:
    curve = curves.get(number, ())
    if not curve or curve[-1][0] < early.min_steps:
        return None
    step = curve[-1][0]
    averages = []
    for trial, other in curves.items():
        values = [value for at, value in other if at <= step and math.isfinite(value)]
        if trial != number and values and other[-1][0] >= step:
            averages.append(_loss(mean_of(values), goal))
    if len(averages) < _FEWEST_OTHERS:
        return None
    median = statistics.median(averages)
    if _loss(best_value(curve, goal), goal) > median:
        shown = median if goal is Goal.MINIMIZE else -median
        return f"worse than the median of {len(averages)} trials at step {step}, {shown:.4g}"
    return None


def _loss(value: float | None, goal: Goal) -> float:
    """Returns a number that is smaller for a better value; infinity without a value."""
    if value is None:
        return math.inf
    return value if goal is Goal.MINIMIZE else -value
