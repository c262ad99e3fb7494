"""The values that a sweep tries: parameters of a config, each with a distribution.

The input is plain data; the output is `Parameter`s. The words are those of the sweep files of Weights & Biases, so that
such a file can be used as it is. A list is a short form of `values`, and any other plain value one of `value`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from forgather.config.insight.path_lookup import path_text, read_path
from forgather.config.path import Key
from forgather.errors import ProjectError, nearest

MOST_TRIALS = 100_000
"""The largest number of trials of a sweep: each is checked before the first one starts."""
_LARGEST, _MOST_STEPS = 1e300, 1 << 53
"""The largest number of a distribution, and the largest number of steps from 0 to it: floats can count no further."""
_FARTHEST = 9
"""In standard deviations: no random number of a normal distribution is farther from the mean, as Python draws them."""


class Distribution(Protocol):
    """The values of a parameter."""

    def draw(self, numbers: random.Random) -> Any:
        """Returns a value that is drawn with these random numbers."""

    def grid(self) -> Iterable[Any] | None:
        """Returns all values, which may be very many, or None if there are infinitely many."""


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

    def grid(self) -> Iterable[Any]:
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
        if self.is_whole:
            return min(max(round(number), int(self.low)), int(self.high))
        low, high = self.ends
        value = number if self.step is None else _rounded(round(number / self.step) * self.step)
        return min(max(value, low), high)

    def grid(self) -> Iterable[float | int] | None:
        """Returns all values, which may be very many, or None if there are infinitely many."""
        if self.is_whole:
            return range(int(self.low), int(self.high) + 1)
        return None if self.step is None else (_rounded(number * self.step) for number in self.multiples)

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        if self.step is None:
            return self.low, self.high
        return _rounded(self.multiples[0] * self.step), _rounded(self.multiples[-1] * self.step)

    @property
    def multiples(self) -> range:
        """The numbers whose products with the step are between the bounds; empty without a step."""
        if self.step is None:
            return range(0)
        return range(math.ceil(_rounded(self.low / self.step)), math.floor(_rounded(self.high / self.step)) + 1)


def _rounded(number: float) -> float:
    # Twelve digits remove what a multiple of 0.1 adds in binary numbers.
    return float(f"{number:.12g}")


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
        return number if self.step is None else _rounded(round(number / self.step) * self.step)

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
        path, place = str(name), below(where, name)
        if isinstance(described, Mapping) and "parameters" in described:
            _refuse_others(described, ("parameters",), place, "a group of parameters")
            inner = read_parameters(described["parameters"], below(place, "parameters"))
            parameters += [Parameter(f"{path}.{one.path}", one.distribution) for one in inner]
        else:
            parameters.append(Parameter(path, read_distribution(described, place)))
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
    read, keys = _KINDS.get(str(name), (None, ()))
    if read is None:
        hint = nearest(str(name), list(_KINDS)) or f"use one of {', '.join(_KINDS)}"
        raise fault(f"{where!r} has the distribution {name!r}, which sweeps do not have", where, hint)
    _refuse_others(found, ("distribution", *keys), where, f"the distribution {name}")
    return read(_Description(found, where))


def _refuse_others(found: Mapping[str, Any], known: Sequence[str], where: str, owner: str) -> None:
    """Raises an error if a mapping has a key that would have no effect."""
    strange = next((str(name) for name in found if name not in known), None)
    if strange is not None:
        hint = f"remove it; {owner} has {', '.join(known)}"
        raise fault(f"{where!r} has the key {strange!r}, which {owner} does not have", where, hint)


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
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
            return value
        message = f"{name!r} of {self.where!r} is {_shown(value)}, and must be a number of at most {_LARGEST:g}"
        raise fault(message, self.where, f"give {name}: NUMBER")

    def choice(self) -> Choice:
        values = self.found.get("values")
        if not isinstance(values, list | tuple) or not values:
            raise fault(f"'values' of {self.where!r} is no list of values", self.where, "list them: values: [1, 2]")
        weights = self.found.get("probabilities")
        if weights is None:
            return Choice(tuple(values))
        is_sound = isinstance(weights, list | tuple) and len(weights) == len(values)
        is_sound = is_sound and all(isinstance(one, int | float) and 0 <= one <= _LARGEST for one in weights)
        if not is_sound or not 0 < sum(weights) < math.inf:
            message = f"'probabilities' of {self.where!r} do not say how likely each of its {len(values)} values is"
            raise fault(message, self.where, "give a number of at least 0 for each value")
        return Choice(tuple(values), tuple(map(float, weights)))

    def constant(self) -> Choice:
        if "value" not in self.found:
            raise fault(f"{self.where!r} has no 'value'", self.where, "give value: VALUE, or list its values")
        return Choice((self.found["value"],))

    def interval(self, *, step: bool = False, is_log: bool = False, is_whole: bool = False) -> Interval:
        low, high = self.number("min"), self.number("max")
        if not low <= high:
            raise fault(f"{self.where!r} begins at {low:g} and ends at {high:g}", self.where, "give min below max")
        if is_log and low <= 0:
            message = f"{self.where!r} begins at {low:g}, which has no logarithm"
            raise fault(message, self.where, "give a min above 0, or the distribution uniform")
        if is_whole and (low != int(low) or high != int(high)):
            message = f"{self.where!r} has bounds that are no whole numbers"
            raise fault(message, self.where, "use uniform, or whole bounds")
        return self._stepped(Interval(low, high, self.step(high, low) if step else None, is_log, is_whole))

    def exponents(self, *, step: bool = False) -> Interval:
        """Returns the distribution whose bounds are natural logarithms."""
        low, high = self.number("min"), self.number("max")
        if not -700 <= low <= high <= 700:
            message = f"{self.where!r} has the exponents {low:g} and {high:g}"
            raise fault(message, self.where, "log_uniform takes exponents of e; log_uniform_values takes the numbers")
        high = math.exp(high)
        return self._stepped(Interval(math.exp(low), high, self.step(high) if step else None, is_log=True))

    def _stepped(self, interval: Interval) -> Interval:
        if interval.step is not None and not interval.multiples:
            message = f"no multiple of {interval.step:g} is between the bounds {interval.low:g} and {interval.high:g}"
            raise fault(f"{message} of {self.where!r}", self.where, "give a smaller q, or other bounds")
        return interval

    def bell(self, *, step: bool = False, is_log: bool = False) -> Bell:
        mean, sigma = self.number("mu", 0.0), self.number("sigma", 1.0)
        if sigma < 0:
            raise fault(f"'sigma' of {self.where!r} is {sigma:g}", self.where, "give a number of at least 0")
        farthest = abs(mean) + _FARTHEST * sigma
        if is_log and farthest > 700:
            message = f"{self.where!r} has the exponents {mean:g} ± {sigma:g}"
            raise fault(message, self.where, "log_normal takes exponents of e, of which mu is the mean")
        return Bell(mean, sigma, self.step(math.exp(farthest) if is_log else farthest) if step else None, is_log)

    def step(self, *numbers: float) -> float:
        """Returns the step, which is not too small for numbers of this size."""
        step, largest = self.number("q", 1.0), max(map(abs, numbers))
        if step <= 0 or largest / step > _MOST_STEPS:
            message = f"'q' of {self.where!r} is {step:g}, for numbers up to {largest:g}"
            raise fault(message, self.where, "give a larger q")
        return step


def _shown(value: Any) -> str:
    # An integer of thousands of digits has no text in Python.
    return "larger" if isinstance(value, int) and abs(value) > _LARGEST else repr(value)


_KEYS = frozenset({"distribution", "values", "value", "probabilities", "min", "max", "mu", "sigma", "q"})
_LIST, _BOUNDS, _BELL = ("values", "probabilities"), ("min", "max"), ("mu", "sigma")
_KINDS: dict[str, tuple[Callable[[_Description], Distribution], Sequence[str]]] = {
    "constant": (_Description.constant, ("value",)),
    "categorical": (_Description.choice, _LIST),
    "categorical_w_probabilities": (_Description.choice, _LIST),
    "int_uniform": (lambda found: found.interval(is_whole=True), _BOUNDS),
    "uniform": (_Description.interval, _BOUNDS),
    "q_uniform": (lambda found: found.interval(step=True), (*_BOUNDS, "q")),
    "log_uniform": (_Description.exponents, _BOUNDS),
    "log_uniform_values": (lambda found: found.interval(is_log=True), _BOUNDS),
    "q_log_uniform": (lambda found: found.exponents(step=True), (*_BOUNDS, "q")),
    "q_log_uniform_values": (lambda found: found.interval(is_log=True, step=True), (*_BOUNDS, "q")),
    "normal": (_Description.bell, _BELL),
    "q_normal": (lambda found: found.bell(step=True), (*_BELL, "q")),
    "log_normal": (lambda found: found.bell(is_log=True), _BELL),
    "q_log_normal": (lambda found: found.bell(is_log=True, step=True), (*_BELL, "q")),
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
    columns: list[list[Any]] = []
    for parameter in parameters:
        values = parameter.distribution.grid()
        if values is None:
            where = below("sweep.parameters", parameter.path)
            hint = "list its values, give it a step (q_uniform), or use method: random"
            raise fault(f"{parameter.path!r} has infinitely many values, which no grid contains", where, hint)
        columns.append(list(islice(values, MOST_TRIALS + 1)))
    if math.prod(map(len, columns)) > MOST_TRIALS:
        message = f"the grid has more than {MOST_TRIALS:,} combinations, which is the limit"
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


def below(where: str, key: Any) -> str:
    """Returns the path of an entry of a mapping.

    Args:
        where: the path of the mapping.
        key: the key of the entry, which may contain dots, as `trainer_args.learning_rate` does.
    """
    return path_text((*read_path(where), Key(key)))


def fault(message: str, path: str, hint: str) -> ProjectError:
    """Returns the error FG560 about a value of a sweep.

    Args:
        message: what was found.
        path: the path of the value in the config.
        hint: what to do.
    """
    return ProjectError(message, code="FG560", path=path, hint=hint)
