"""Values that Optuna proposes, by the results of the trials so far.

The input is the trials that have ended; the output is the values of the next one. No state is kept: the study is made
again from the results for each proposal, and the seed depends on the number of the trial, so a sweep that was killed
proposes what it would have proposed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from forgather.errors import ProjectError
from forgather.sweeps.space import Bell, Choice, Distribution, Interval, Parameter, below, fault
from forgather.sweeps.spec import Goal, SweepSpec

_MOST = 1 << 40
"""Optuna computes with floats, whose precision larger whole numbers exceed."""
Result = tuple[Mapping[str, Any], float | None]
"""The values of a trial by path, and its result; None if it has none yet, or failed."""


def refuse_missing_optuna(spec: SweepSpec) -> None:
    """Raises an error if Optuna is not installed, or cannot propose values of these distributions.

    Raises:
        ProjectError: FG566 if it is missing; FG560 if a parameter has a distribution that it does not have.
    """
    _optuna()
    for parameter in spec.parameters:
        _distribution(parameter)


def proposed(spec: SweepSpec, number: int, results: Sequence[Result]) -> dict[str, Any]:
    """Returns the values of the next trial.

    Args:
        spec: what the sweep is to do.
        number: the number of the trial.
        results: the earlier trials, in order; those that are running count as bad ones, so that no two are alike.
    """
    optuna = _optuna()
    space = {parameter.path: _distribution(parameter) for parameter in spec.parameters}
    # Seeds of consecutive numbers would otherwise be those of another sweep.
    sampler = optuna.samplers.TPESampler(seed=(spec.seed * 1_000_003 + number) % 2**32)
    direction = "minimize" if spec.goal is Goal.MINIMIZE else "maximize"
    study = optuna.create_study(sampler=sampler, direction=direction)
    known = [value for _, value in results if value is not None and math.isfinite(value)]
    worst = (max if spec.goal is Goal.MINIMIZE else min)(known, default=0.0)
    for values, value in results:
        result = value if value is not None and math.isfinite(value) else worst
        # A version that read bounds in another way may have drawn a value outside of them.
        with suppress(ValueError):
            study.add_trial(optuna.trial.create_trial(params=dict(values), distributions=space, value=result))
    return dict(study.ask(fixed_distributions=space).params)


def _optuna() -> Any:
    try:
        optuna = import_module("optuna")
    except ImportError:
        raise ProjectError(
            "method 'optuna' needs the package optuna, which is not installed",
            code="FG566",
            hint="pip install 'forgather[sweep]', or use method: random",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(parameter: Parameter) -> Any:
    found = _as_optuna(parameter.distribution, _optuna().distributions)
    if found is None:
        where = below("sweep.parameters", parameter.path)
        hint = "use values, uniform or log_uniform_values, or method: random"
        raise fault(f"Optuna has no distribution for {parameter.path!r}", where, hint)
    return found


def _as_optuna(one: Distribution, kinds: Any) -> Any:
    if isinstance(one, Choice) and one.weights is None and all(_is_plain(value) for value in one.values):
        return kinds.CategoricalDistribution(one.values)
    if isinstance(one, Interval) and one.is_whole and max(abs(one.low), abs(one.high)) < _MOST:
        return kinds.IntDistribution(int(one.low), int(one.high), log=one.is_log)
    if isinstance(one, Interval) and not one.is_whole and not (one.is_log and one.step is not None):
        # Optuna counts steps from the lower bound.
        low, high = one.ends
        return kinds.FloatDistribution(low, high, log=one.is_log, step=one.step)
    assert isinstance(one, Bell | Choice | Interval)  # noqa: S101 - there are no other distributions
    return None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
