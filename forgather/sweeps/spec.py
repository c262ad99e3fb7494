"""What a sweep is to do: its parameters, its method, its metric, and when it ends a trial early.

The input is the target `sweep` of a config, a sweep file of Weights & Biases, or options of the command line; the
output is a `SweepSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from forgather.bounded import read_text
from forgather.config.insight.path_lookup import read_path, steps_along
from forgather.config.load import load_value
from forgather.config.override import split_assignment
from forgather.errors import ForgatherError, ProjectError, nearest
from forgather.project.literal import plain_value
from forgather.project.project import Project
from forgather.sweeps.space import Choice, Parameter, fault, read_parameters

TARGET = "sweep"
"""The name of the target of a config that describes its sweep."""
_MAX_BYTES = 1_000_000
_Word = TypeVar("_Word", bound=StrEnum)
_KEYS = ("method", "metric", "parameters", "early_terminate", "run_cap", "seed", "name", "description")
_OF_OTHER_PROGRAMS = ("program", "command", "project", "entity", "controller", "imageuri", "job", "$schema")
"""Keys of sweep files that say how another program starts its runs."""
_METHODS = {"bayes": "optuna", "tpe": "optuna"}
_DEFAULT_METRIC, _HIGH_IS_GOOD = "eval_loss", ("accuracy", "f1", "rouge", "bleu", "exact_match", "score", "reward")


class Method(StrEnum):
    """How a sweep chooses the values of its trials."""

    GRID = "grid"
    RANDOM = "random"
    OPTUNA = "optuna"


class Goal(StrEnum):
    """Which values of the metric are good."""

    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


class Rule(StrEnum):
    """The rule by which a trial is ended early."""

    ASHA = "asha"
    MEDIAN = "median"


@dataclass(frozen=True, kw_only=True)
class EarlyTermination:
    """When a trial is ended early.

    Args:
        rule: the rule.
        min_steps: the first step at which a trial may end.
        eta: for ASHA, the share 1 / eta of the trials that go on after each rung, and the ratio of two rungs.
    """

    rule: Rule
    min_steps: int
    eta: int = 3


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """What a sweep is to do.

    Args:
        parameters: what it changes.
        method: how it chooses values.
        metric: the name of the metric that it compares.
        goal: which values of the metric are good.
        num_trials: the number of trials in all; None for the whole grid.
        seed: the seed of random values.
        early: when trials end early; None if they do not.
        ignored: the keys of a sweep file that say how another program starts its runs, and have no effect here.
    """

    parameters: tuple[Parameter, ...]
    method: Method = Method.GRID
    metric: str = _DEFAULT_METRIC
    goal: Goal = Goal.MINIMIZE
    num_trials: int | None = None
    seed: int = 0
    early: EarlyTermination | None = None
    # Not in the text of a spec, from which a sweep that goes on is recognized.
    ignored: tuple[str, ...] = field(default=(), repr=False)

    def is_better(self, value: float, other: float) -> bool:
        """Returns whether a value of the metric is better than another one."""
        return value < other if self.goal is Goal.MINIMIZE else value > other


def spec_of(
    project: Project,
    *,
    file: str | None = None,
    grid: Sequence[str] = (),
    method: str | None = None,
    trials: int | None = None,
    metric: str | None = None,
    seed: int | None = None,
) -> SweepSpec:
    """Returns what the sweep of a config is to do. Options of the command line take precedence over the config.

    Args:
        project: the project, opened with the config.
        file: a sweep file that takes the place of the config's own `sweep`.
        grid: assignments of values to paths, as `trainer_args.learning_rate=1e-3,3e-3`, added to the parameters.
        method: the method.
        trials: the number of trials.
        metric: the metric, as `eval_loss` or `eval_accuracy:maximize`.
        seed: the seed.

    Raises:
        ProjectError: FG560 if the sweep is malformed; FG561 if there is none.
    """
    found = _from_file(file) if file is not None else _from_graph(project)
    if found is None and not grid:
        raise ProjectError(
            f"config {project.config_name!r} has no sweep",
            code="FG561",
            hint="say what to try: --grid trainer_args.learning_rate=1e-3,3e-3, or a block [sweep] in the config",
        )
    where = file or TARGET
    added = tuple(_grid_parameter(text) for text in grid)
    with _located(project):
        spec = _read({} if found is None else found, where, has_others=bool(added))
    replaced = {one.path for one in added}
    kept = tuple(one for one in spec.parameters if one.path not in replaced)
    spec = replace(spec, parameters=(*kept, *added))
    if trials is not None:
        spec = replace(spec, num_trials=trials)
    if seed is not None:
        spec = replace(spec, seed=seed)
    if metric is not None:
        name, _, goal = metric.partition(":")
        spec = replace(spec, metric=name, goal=_goal(goal or None, name, "--metric"))
    if method is not None:
        spec = replace(spec, method=_one_of(Method, _METHODS.get(method, method), "--method"))
    return _complete(spec, where)


@contextmanager
def _located(project: Project) -> Iterator[None]:
    """Context manager that gives an error about a value of the target `sweep` the line of that value."""
    try:
        yield
    except ProjectError as error:
        steps = read_path(error.path or TARGET)
        # The value may be a part of a mapping, or missing: the nearest line that exists is the one to look at.
        stops = steps_along(project.graph, steps)
        if error.span is None and stops:
            error.span = stops[-1].entry.span if stops[-1].entry is not None else stops[-1].node.span
        raise


def _complete(spec: SweepSpec, where: str) -> SweepSpec:
    if spec.method is not Method.GRID and spec.num_trials is None:
        message = f"the method {spec.method} needs a number of trials"
        raise fault(message, where, "give --trials N, or run_cap: N in the sweep")
    if spec.num_trials is not None and spec.num_trials < 1:
        raise fault(f"the number of trials is {spec.num_trials}", where, "give a number of at least 1")
    return spec


def _from_graph(project: Project) -> Mapping[str, Any] | None:
    entry = project.graph.targets.get(TARGET)
    if entry is None:
        return None
    found = plain_value(entry.value, f"target {TARGET!r}", code="FG560")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        with _located(project):
            raise fault(f"target {TARGET!r} is {found!r}", TARGET, "make it a mapping with 'parameters'")
    return found


def _from_file(file: str) -> Mapping[str, Any]:
    try:
        found = plain_value(load_value(read_text(file, _MAX_BYTES), file), file, code="FG560")
    except (OSError, ValueError) as error:
        if isinstance(error, ForgatherError):
            raise
        why = getattr(error, "strerror", None) or error
        raise ProjectError(
            f"sweep file {file!r} cannot be read: {why}", code="FG560", hint="name a YAML file"
        ) from None
    if not isinstance(found, Mapping):
        raise fault(f"sweep file {file!r} holds no mapping", file, "write 'parameters:' and what to try")
    return found


def _read(found: Mapping[str, Any], where: str, *, has_others: bool) -> SweepSpec:
    for name in found:
        if name not in (*_KEYS, *_OF_OTHER_PROGRAMS):
            hint = nearest(str(name), _KEYS) or f"known are {', '.join(_KEYS)}"
            raise fault(f"{where!r} has the key {name!r}, which sweeps do not have", f"{where}.{name}", hint)
    method = str(found.get("method", Method.GRID))
    metric, goal = _metric(found.get("metric"), where)
    # Options of the command line may be all that is tried.
    is_empty = has_others and "parameters" not in found
    return SweepSpec(
        parameters=() if is_empty else read_parameters(found.get("parameters"), f"{where}.parameters"),
        method=_one_of(Method, _METHODS.get(method, method), f"{where}.method"),
        metric=metric,
        goal=goal,
        num_trials=_whole(found, "run_cap", where),
        seed=_whole(found, "seed", where) or 0,
        early=_early(found.get("early_terminate"), f"{where}.early_terminate"),
        ignored=tuple(name for name in found if name in _OF_OTHER_PROGRAMS),
    )


def _metric(found: Any, where: str) -> tuple[str, Goal]:
    if found is None:
        return _DEFAULT_METRIC, Goal.MINIMIZE
    name, goal = (found.get("name"), found.get("goal")) if isinstance(found, Mapping) else (found, None)
    if not isinstance(name, str) or not name:
        raise fault(f"'metric' of {where!r} is {found!r}", f"{where}.metric", "give {name: eval_loss, goal: minimize}")
    return name, _goal(goal, name, f"{where}.metric.goal")


def _goal(goal: Any, name: str, where: str) -> Goal:
    if goal is None:
        return Goal.MAXIMIZE if any(word in name for word in _HIGH_IS_GOOD) else Goal.MINIMIZE
    return _one_of(Goal, str(goal), where)


def _one_of(kind: type[_Word], word: str, where: str) -> _Word:
    try:
        return kind(word)
    except ValueError:
        known = [str(one) for one in kind]
        raise fault(f"{where!r} is {word!r}", where, nearest(word, known) or f"use one of {', '.join(known)}") from None


def _whole(found: Mapping[str, Any], name: str, where: str) -> int | None:
    value = found.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise fault(f"{name!r} of {where!r} is {value!r}", f"{where}.{name}", "give a whole number")


def _early(found: Any, where: str) -> EarlyTermination | None:
    if found is None:
        return None
    if not isinstance(found, Mapping):
        found = {"type": found}
    known = ("type", "min_steps", "min_iter", "eta")
    strange = next((name for name in found if name not in known), None)
    if strange is not None:
        hint = nearest(str(strange), known) or f"known are {', '.join(known)}"
        raise fault(f"{where!r} has the key {strange!r}", f"{where}.{strange}", hint)
    # Hyperband of the sweep files ends trials at rungs, as ASHA does.
    word = {"hyperband": "asha"}.get(str(found.get("type", "asha")), str(found.get("type", "asha")))
    steps = _whole(found, "min_steps" if "min_steps" in found else "min_iter", where)
    eta = _whole(found, "eta", where)
    if not steps:
        raise fault(f"{where!r} does not say from which step on trials may end", where, "give min_steps: N")
    if eta is not None and eta < 2:
        raise fault(f"'eta' of {where!r} is {eta}", f"{where}.eta", "give a whole number of at least 2")
    return EarlyTermination(rule=_one_of(Rule, word, f"{where}.type"), min_steps=steps, eta=eta or 3)


def _grid_parameter(text: str) -> Parameter:
    """Returns the parameter of `--grid PATH=VALUE,VALUE`; a YAML list after the `=` is taken as it is."""
    path, values = split_assignment(text)
    found = plain_value(load_value(f"[{values}]"), f"--grid {text}", code="FG560")
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):
        found = found[0]  # the brackets were written
    if not path or not isinstance(found, list) or not found:
        raise fault(f"--grid {text!r} names no values", path, "write --grid PATH=VALUE,VALUE")
    return Parameter(path, Choice(tuple(found)))
