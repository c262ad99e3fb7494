"""Reward functions: functions of the user, each with a name in the logs, whose results are checked.

Takes what a config gives as `reward_funcs`; gives what TRL calls. Functions with equal names get different ones: TRL
would log the mean of both as that of one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from forgather.errors import TrainingError
from forgather.ml.number_format import plural

_ALWAYS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class RewardError(TrainingError, ValueError):
    """Raised if a reward function cannot be called, or does not return one reward for each answer."""

    code = "FG986"


class RewardFunction:
    """A reward function with TRL's signature whose result is checked.

    Args:
        function: the function, which is called with the keywords `prompts`, `completions`, `completion_ids`,
            `trainer_state`, `log_extra`, `log_metric` and the columns of the data set, and returns one number for each
            answer; None where it does not apply.
        name: the name in the logs.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.__name__ = name

    def __call__(self, **given: Any) -> list[float | None]:
        """Returns the rewards of the answers.

        Args:
            **given: the keywords of the function, and `completions`, whose number is that of the rewards.

        Raises:
            RewardError: FG986 if the function does not return one number, or None, for each answer.
        """
        count, found = len(given["completions"]), self.function(**given)
        values = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
            what = plural(len(values), "reward") if isinstance(values, list | tuple) else f"{values!r:.60}"
            raise self._wrong(f"returned {what} for {plural(count, 'answer')}")
        for number, value in enumerate(values):
            if value is not None and not (isinstance(value, int | float) and abs(value) <= sys.float_info.max):
                prompts = given.get("prompts") or [""] * count
                where = f"answer {number} of {plural(count, 'answer')}, to the prompt {prompts[number]!r:.60}"
                raise self._wrong(f"returned {_shown(value)} for {where}")
        return [None if value is None else float(value) for value in values]

    def _wrong(self, what: str) -> RewardError:
        return RewardError(
            f"the reward function {self.__name__!r} {what}",
            hint="return a list with one finite number for each of `completions`; None where the reward does not apply",
        ).about("reward_funcs")


def reward_functions(given: Any, columns: Iterable[str]) -> list[Any]:
    """Returns the reward functions for TRL.

    Args:
        given: a function, a reward model or its folder, or a list of these.
        columns: the columns of the data set that the functions get.

    Raises:
        RewardError: FG986 if there is none, if one cannot be called, or does not take the arguments that it gets.
    """
    listed = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if not listed:
        raise RewardError(
            "there is no reward function",
            hint="name one in [reward_funcs]: - !partial:rewards.py:reward []",
        ).about("reward_funcs")
    keywords = dict.fromkeys([*_ALWAYS, *columns])
    return [_prepared(one, keywords, listed[:number]) for number, one in enumerate(listed)]


def _prepared(one: Any, keywords: dict[str, Any], before: Sequence[Any]) -> Any:
    if isinstance(one, str) or hasattr(one, "config"):  # a reward model of TRL
        return one
    if not callable(one):
        raise RewardError(
            f"a reward function is a {type(one).__name__}",
            hint="a function, as in !partial:rewards.py:reward, or the folder of a reward model",
        ).about("reward_funcs")
    name = _name(one)
    if same := sum(_name(other) == name for other in before):
        name = f"{name}_{same + 1}"
    try:
        inspect.signature(one).bind(**keywords)
    except TypeError as error:
        raise RewardError(
            f"the reward function {name!r} cannot be called: {error}",
            hint=f"it gets {', '.join(keywords)}: def {name}(completions, **others)",
        ).about("reward_funcs") from None
    except ValueError:  # a function in C has no signature
        pass
    # TRL recognizes a coroutine by the function itself.
    return one if inspect.iscoroutinefunction(one) else RewardFunction(one, name)


def _shown(value: Any) -> str:
    if isinstance(value, int):  # Python does not convert every whole number to text
        return "a whole number that no float can hold"
    return f"{value!r:.60}" if isinstance(value, str | float) else f"a {type(value).__name__}"


def _name(function: Any) -> str:
    while hasattr(function, "func"):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
