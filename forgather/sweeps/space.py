"""The values that a sweep tries: parameters of a config, each with a distribution.

The input is plain data; the output is `Parameter`s. The words are those of the sweep files of Weights & Biases, so that
such a file can be used as it is. A list is a short form of `values`, and any other plain value one of `value`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from forgather.errors import ProjectError, nearest

_MOST_GRID_VALUES = 100_000


class Distribution(Protocol):
    """The values of a parameter."""

    def draw(self, numbers: random.Random) -> Any:
        """Returns a value that is drawn with these random numbers."""

    def grid(self) -> Sequence[Any] | None:
        """Returns all values, or None if there are infinitely many."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several values.

    Args:
        values: the values.
        weights: the probability of each; None for equal ones.
    """

    values: tuple[Any, ...]
    weights: tuple[float, ...] | None = None

    def draw(self, numbers: random.Random) -> Any:
        """Returns a value that is drawn with these random numbers."""
        return numbers.choices(self.values, self.weights)[0]

    def grid(self) -> Sequence[Any]:
        """Returns all values."""
        return self.values


@dataclass(frozen=True, slots=True)
class Interval:
    """A number between two bounds.

    Args:
        low: the lower bound.
        high: the upper bound.
        step: the distance between two values, counted from 0 as in the sweep files; None for all numbers.
        is_log: whether the logarithm is distributed evenly, instead of the number.
        is_whole: whether only whole numbers are meant.
    """

    low: float
    high: float
    step: float | None = None
    is_log: bool = False
    is_whole: bool = False

    def draw(self, numbers: random.Random) -> float | int:
        """Returns a value that is drawn with these random numbers."""
        if self.is_whole and not self.is_log:
            return numbers.randint(int(self.low), int(self.high))
        if self.is_log:
            number = math.exp(numbers.uniform(math.log(self.low), math.log(self.high)))
        else:
            number = numbers.uniform(self.low, self.high)
        return self._rounded(number)

    def grid(self) -> Sequence[float | int] | None:
        """Returns all values, or None if there are infinitely many."""
        step = 1 if self.is_whole else self.step
        if step is None:
            return None
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [self._rounded(number * step) for number in range(first, last + 1)]

    def _rounded(self, number: float) -> float | int:
        if self.is_whole:
            return min(max(round(number), int(self.low)), int(self.high))
        if self.step is None:
            return min(max(number, self.low), self.high)
        # Twelve digits remove what a multiple of 0.1 adds in binary numbers.
        return float(f"{round(number / self.step) * self.step:.12g}")


@dataclass(frozen=True, slots=True)
class Bell:
    """A number of a normal distribution, or one whose logarithm is.

    Args:
        mu: the mean.
        sigma: the standard deviation.
        step: the distance between two values; None for all numbers.
        is_log: whether the logarithm is distributed normally.
    """

    mu: float
    sigma: float
    step: float | None = None
    is_log: bool = False

    def draw(self, numbers: random.Random) -> float:
        """Returns a value that is drawn with these random numbers."""
        number = numbers.gauss(self.mu, self.sigma)
        number = math.exp(number) if self.is_log else number
        return number if self.step is None else float(f"{round(number / self.step) * self.step:.12g}")

    def grid(self) -> None:
        """Returns None: there are infinitely many values."""
        return None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value of a config that a sweep changes.

    Args:
        path: the path of the value in the graph, as for `--set`.
        distribution: its values.
    """

    path: str
    distribution: Distribution


def read_parameters(found: Any, where: str = "sweep.parameters") -> tuple[Parameter, ...]:
    """Returns the parameters of a sweep.

    Args:
        found: the mapping of paths to values or distributions; a mapping with `parameters` adds its own path in front.
        where: the path of the mapping, for messages.

    Raises:
        ProjectError: FG560 if something is not a distribution.
    """
    if not isinstance(found, Mapping) or not found:
        raise fault(f"{where!r} has no parameter", where, "name a value of the config and what to try: a: [1, 2]")
    parameters: list[Parameter] = []
    for name, described in found.items():
        path = str(name)
        if isinstance(described, Mapping) and "parameters" in described:
            inner = read_parameters(described["parameters"], f"{where}.{path}.parameters")
            parameters += [Parameter(f"{path}.{one.path}", one.distribution) for one in inner]
        else:
            parameters.append(Parameter(path, read_distribution(described, f"{where}.{path}")))
    twice = next((one.path for one in parameters if sum(other.path == one.path for other in parameters) > 1), None)
    if twice is not None:
        raise fault(f"{where!r} has the parameter {twice!r} twice", where, "keep one of them")
    return tuple(parameters)


def read_distribution(found: Any, where: str) -> Distribution:
    """Returns the distribution that a value of `parameters` describes.

    Args:
        found: a list of values, a mapping, or one value.
        where: the path of the value, for messages.

    Raises:
        ProjectError: FG560 if it describes no distribution.

    Example:
        >>> read_distribution([1, 2], "sweep.parameters.a")
        Choice(values=(1, 2), weights=None)
        >>> read_distribution({"min": 1e-4, "max": 1e-2, "distribution": "log_uniform_values"}, "a")
        Interval(low=0.0001, high=0.01, step=None, is_log=True, is_whole=False)
    """
    if not isinstance(found, Mapping):
        values = tuple(found) if isinstance(found, list | tuple) else (found,)
        if not values:
            raise fault(f"{where!r} has no value to try", where, "list at least one value")
        return Choice(values)
    unknown = next((str(name) for name in found if name not in _KEYS), None)
    if unknown is not None:
        hint = nearest(unknown, sorted(_KEYS)) or f"known are {', '.join(sorted(_KEYS))}"
        raise fault(f"{where!r} has the key {unknown!r}, which no distribution has", where, hint)
    name = found.get("distribution", _implied(found))
    read = _KINDS.get(str(name))
    if read is None:
        raise fault(
            f"{where!r} has the distribution {name!r}, which sweeps do not have",
            where,
            nearest(str(name), list(_KINDS)) or f"use one of {', '.join(_KINDS)}",
        )
    return read(_Description(found, where))


def _implied(found: Mapping[str, Any]) -> str:
    """Returns the name of the distribution that a mapping without one has, as in the sweep files."""
    if "values" in found:
        return "categorical"
    if "value" in found:
        return "constant"
    bounds = [found.get("min"), found.get("max")]
    return "int_uniform" if all(isinstance(one, int) and not isinstance(one, bool) for one in bounds) else "uniform"


@dataclass(frozen=True, slots=True)
class _Description:
    """The mapping that describes a distribution."""

    found: Mapping[str, Any]
    where: str

    def number(self, name: str, default: float | None = None) -> float:
        value = self.found.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
        raise fault(
            f"{name!r} of {self.where!r} is {value!r}, and must be a number", self.where, f"give {name}: NUMBER"
        )

    def choice(self) -> Choice:
        values = self.found.get("values")
        if not isinstance(values, list | tuple) or not values:
            raise fault(f"'values' of {self.where!r} is no list of values", self.where, "list them: values: [1, 2]")
        weights = self.found.get("probabilities")
        if weights is None:
            return Choice(tuple(values))
        is_sound = isinstance(weights, list | tuple) and len(weights) == len(values)
        if not is_sound or not all(isinstance(one, int | float) and one >= 0 for one in weights) or sum(weights) <= 0:
            message = f"'probabilities' of {self.where!r} do not say how likely each of its {len(values)} values is"
            raise fault(message, self.where, "give a number of at least 0 for each value")
        return Choice(tuple(values), tuple(map(float, weights)))

    def constant(self) -> Choice:
        return Choice((self.found.get("value"),))

    def interval(self, *, step: bool = False, is_log: bool = False, is_whole: bool = False) -> Interval:
        low, high = self.number("min"), self.number("max")
        if not low <= high:
            raise fault(f"{self.where!r} begins at {low:g} and ends at {high:g}", self.where, "give min below max")
        if is_log and low <= 0:
            message = f"{self.where!r} begins at {low:g}, which has no logarithm"
            raise fault(message, self.where, "give a min above 0, or the distribution uniform")
        if is_whole and (low != int(low) or high != int(high)):
            raise fault(
                f"{self.where!r} has bounds that are no whole numbers", self.where, "use uniform, or whole bounds"
            )
        return Interval(low, high, self.step() if step else None, is_log, is_whole)

    def exponents(self, *, step: bool = False) -> Interval:
        """Returns the distribution whose bounds are natural logarithms."""
        low, high = self.number("min"), self.number("max")
        if not low <= high or high > 700:
            message = f"{self.where!r} has the exponents {low:g} and {high:g}"
            raise fault(message, self.where, "log_uniform takes exponents of e; log_uniform_values takes the numbers")
        return Interval(math.exp(low), math.exp(high), self.step() if step else None, is_log=True)

    def bell(self, *, step: bool = False, is_log: bool = False) -> Bell:
        sigma = self.number("sigma", 1.0)
        if sigma < 0:
            raise fault(f"'sigma' of {self.where!r} is {sigma:g}", self.where, "give a number of at least 0")
        return Bell(self.number("mu", 0.0), sigma, self.step() if step else None, is_log)

    def step(self) -> float:
        step = self.number("q", 1.0)
        if step <= 0:
            raise fault(f"'q' of {self.where!r} is {step:g}", self.where, "give a number above 0")
        return step


_KEYS = frozenset({"distribution", "values", "value", "probabilities", "min", "max", "mu", "sigma", "q"})
_KINDS: dict[str, Callable[[_Description], Distribution]] = {
    "constant": _Description.constant,
    "categorical": _Description.choice,
    "categorical_w_probabilities": _Description.choice,
    "int_uniform": lambda found: found.interval(is_whole=True),
    "uniform": _Description.interval,
    "q_uniform": lambda found: found.interval(step=True),
    "log_uniform": _Description.exponents,
    "log_uniform_values": lambda found: found.interval(is_log=True),
    "q_log_uniform": lambda found: found.exponents(step=True),
    "q_log_uniform_values": lambda found: found.interval(is_log=True, step=True),
    "normal": _Description.bell,
    "q_normal": lambda found: found.bell(step=True),
    "log_normal": lambda found: found.bell(is_log=True),
    "q_log_normal": lambda found: found.bell(is_log=True, step=True),
}


def grid_of(parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
    """Returns all combinations of the values of parameters; the last parameter changes fastest.

    Args:
        parameters: the parameters.

    Raises:
        ProjectError: FG560 if a parameter has infinitely many values, or there are too many combinations.

    Example:
        >>> grid_of([Parameter("a", Choice((1, 2))), Parameter("b", Choice((3,)))])
        [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    columns: list[Sequence[Any]] = []
    for parameter in parameters:
        values = parameter.distribution.grid()
        if values is None:
            where = f"sweep.parameters.{parameter.path}"
            hint = "list its values, give it a step (q_uniform), or use method: random"
            raise fault(f"{parameter.path!r} has infinitely many values, which no grid contains", where, hint)
        columns.append(values)
    sizes = list(accumulate((len(values) for values in columns), int.__mul__, initial=1))
    if sizes[-1] > _MOST_GRID_VALUES:
        message = f"the grid has {sizes[-1]:,} combinations, and at most {_MOST_GRID_VALUES:,} are possible"
        raise fault(message, "sweep.parameters", "use method: random with a number of trials")
    rows: list[dict[str, Any]] = [{}]
    for parameter, values in zip(parameters, columns, strict=True):
        rows = [{**row, parameter.path: value} for row in rows for value in values]
    return rows


def drawn(parameters: Sequence[Parameter], seed: int, number: int) -> dict[str, Any]:
    """Returns the values of a random trial, which depend on nothing but the seed and the number of the trial.

    Args:
        parameters: the parameters.
        seed: the seed of the sweep.
        number: the number of the trial.
    """
    numbers = random.Random(f"{seed}:{number}")  # noqa: S311 - no secret is drawn
    return {parameter.path: parameter.distribution.draw(numbers) for parameter in parameters}


def fault(message: str, path: str, hint: str) -> ProjectError:
    """Returns the error FG560 about a value of a sweep.

    Args:
        message: what was found.
        path: the path of the value in the config.
        hint: what to do.
    """
    return ProjectError(message, code="FG560", path=path, hint=hint)
