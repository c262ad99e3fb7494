"""What a sweep is to do: its parameters, its method, its metric, and when it ends a trial early.

The input is the target `sweep` of a config, a sweep file of Weights & Biases, or options of the command line; the
output is a `SweepSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from forgather.bounded import read_text
from forgather.config.graph import Entry, Graph, Node
from forgather.config.insight.path_lookup import read_path, steps_along
from forgather.config.load import load_value
from forgather.config.override import split_assignment
from forgather.errors import ForgatherError, ProjectError, nearest
from forgather.project.literal import plain_value
from forgather.project.project import Project
from forgather.runs.metric_choice import is_higher_better
from forgather.sweeps.space import MOST_TRIALS, Choice, Parameter, below, fault, read_parameters

TARGET = "sweep"
"""The name of the target of a config that describes its sweep."""
_MAX_BYTES = 1_000_000
_Word = TypeVar("_Word", bound=StrEnum)
_KEYS = ("method", "metric", "parameters", "early_terminate", "run_cap", "seed", "name", "description")
_OF_OTHER_PROGRAMS = ("program", "command", "project", "entity", "controller", "imageuri", "job", "$schema")
"""Keys of sweep files that say how another program starts its runs."""
_WITHOUT_EFFECT = (*_OF_OTHER_PROGRAMS, "name", "description")
_METHODS = {"bayes": "optuna", "tpe": "optuna"}
_DEFAULT_METRIC = "eval_loss"
_HIGH_IS_GOOD = (
    "accuracy", "f1", "precision", "recall", "auc", "rouge", "bleu", "exact_match", "score", "reward", "win_rate",
)  # fmt: skip
"""Parts of names that comparisons do not know, such as `f1_macro`."""


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
    """

    parameters: tuple[Parameter, ...]
    method: Method = Method.GRID
    metric: str = _DEFAULT_METRIC
    goal: Goal = Goal.MINIMIZE
    num_trials: int | None = None
    seed: int = 0
    early: EarlyTermination | None = None

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
    graph, found = _described(project, file)
    if found is None and not grid:
        raise ProjectError(
            f"config {project.config_name!r} has no sweep",
            code="FG561",
            hint="say what to try: --grid trainer_args.learning_rate=1e-3,3e-3, or a block [sweep] in the config",
        )
    added = tuple(_grid_parameter(text) for text in grid)
    with _located(graph):
        spec = _read({} if found is None else found, has_others=bool(added))
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
    # A number of trials on the command line is no line of the config.
    with _located(graph) if trials is None else nullcontext():
        return _complete(spec)


@contextmanager
def _located(graph: Graph) -> Iterator[None]:
    """Context manager that gives an error about a value of the target `sweep` the line of that value."""
    try:
        yield
    except ProjectError as error:
        steps = read_path(error.path or TARGET)
        # The value may be a part of a mapping, or missing: the nearest line that exists is the one to look at.
        stops = steps_along(graph, steps)
        if error.span is None and stops:
            entry = stops[-1].entry
            error.span = (None if entry is None else entry.span) or stops[-1].node.span
        raise


def _complete(spec: SweepSpec) -> SweepSpec:
    if spec.method is not Method.GRID and spec.num_trials is None:
        message = f"the method {spec.method} needs a number of trials"
        raise fault(message, TARGET, "give --trials N, or run_cap: N in the sweep")
    if spec.num_trials is not None and not 1 <= spec.num_trials <= MOST_TRIALS:
        raise fault(f"the number of trials is {spec.num_trials}", TARGET, f"give a number from 1 to {MOST_TRIALS:,}")
    if not spec.metric:
        raise fault("the metric has no name", TARGET, "name one, as --metric eval_loss")
    return spec


def _described(project: Project, file: str | None) -> tuple[Graph, Mapping[str, Any] | None]:
    """Returns the graph whose target `sweep` describes a sweep, and the description; None if there is none."""
    graph = project.graph if file is None else Graph({TARGET: Entry(TARGET, _content(file))})
    entry = graph.targets.get(TARGET)
    found = None if entry is None else plain_value(entry.value, f"target {TARGET!r}", code="FG560")
    if isinstance(found, Mapping) or (found is None and file is None):
        return graph, found
    with _located(graph):
        raise fault(f"{TARGET!r} is {found!r}", TARGET, "make it a mapping with 'parameters'")


def _content(file: str) -> Node:
    try:
        return load_value(read_text(file, _MAX_BYTES), file)
    except (OSError, ValueError) as error:
        if isinstance(error, ForgatherError):
            raise
        why = getattr(error, "strerror", None) or error
        raise ProjectError(
            f"sweep file {file!r} cannot be read: {why}", code="FG560", hint="name a YAML file"
        ) from None


def _read(found: Mapping[str, Any], *, has_others: bool) -> SweepSpec:
    where = TARGET
    for name in found:
        if name not in (*_KEYS, *_OF_OTHER_PROGRAMS):
            hint = nearest(str(name), _KEYS) or f"known are {', '.join(_KEYS)}"
            raise fault(f"{where!r} has the key {name!r}, which sweeps do not have", below(where, name), hint)
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
    )


def ignored_keys(project: Project, file: str | None) -> list[str]:
    """Returns the keys of a sweep that have no effect, such as those that say how another program starts its runs.

    Args:
        project: the project, opened with the config.
        file: the sweep file that takes the place of the config's own `sweep`, or None.
    """
    return [name for name in _described(project, file)[1] or () if name in _WITHOUT_EFFECT]


def _metric(found: Any, where: str) -> tuple[str, Goal]:
    if found is None:
        return _DEFAULT_METRIC, Goal.MINIMIZE
    name, goal = (found.get("name"), found.get("goal")) if isinstance(found, Mapping) else (found, None)
    strange = next((key for key in found if key not in ("name", "goal")), None) if isinstance(found, Mapping) else None
    if strange is not None:
        message = f"'metric' of {where!r} has the key {strange!r}, which has no effect"
        raise fault(message, f"{where}.metric", "remove it; a metric has a name and a goal")
    if not isinstance(name, str) or not name:
        raise fault(f"'metric' of {where!r} is {found!r}", f"{where}.metric", "give {name: eval_loss, goal: minimize}")
    return name, _goal(goal, name, f"{where}.metric.goal")


def _goal(goal: Any, name: str, where: str) -> Goal:
    if goal is None:
        known = is_higher_better(name)
        is_high = any(word in name for word in _HIGH_IS_GOOD) if known is None else known
        return Goal.MAXIMIZE if is_high else Goal.MINIMIZE
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
        raise fault(f"{where!r} has the key {strange!r}", below(where, strange), hint)
    # Hyperband of the sweep files ends trials at rungs, as ASHA does.
    word = {"hyperband": "asha"}.get(str(found.get("type", "asha")), str(found.get("type", "asha")))
    if "min_steps" in found and "min_iter" in found:
        raise fault(f"{where!r} has both 'min_steps' and 'min_iter'", where, "they mean the same: keep one")
    steps = _whole(found, "min_steps" if "min_steps" in found else "min_iter", where)
    eta = _whole(found, "eta", where)
    if eta is not None and word == Rule.MEDIAN:
        raise fault(f"'eta' of {where!r} has no effect: the median rule has no rungs", f"{where}.eta", "remove it")
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
