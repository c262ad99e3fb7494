"""Checks of the arguments of what a script calls.

The input is arguments and what is expected of each; the output is a `TrainingError` for the first one that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forgather.errors import TrainingError
from forgather.rule_conditions import misfit
from forgather.value_text import can_be_path, shown

Rule = Mapping[str, Any] | str
FLAG: Rule = {"type": "flag"}
COUNT: Rule = {"type": "whole", "minimum": 1, "maximum": 2**63 - 1, "expected": "a whole number from 1"}
COUNT_OR_0: Rule = {"type": "whole", "minimum": 0, "maximum": 2**63 - 1, "expected": "a whole number from 0"}
ATTEMPTS: Rule = {"type": "whole", "minimum": 0, "maximum": 1000, "expected": "a whole number from 0 to 1000"}
TEXT: Rule = {"type": "text"}
PATH = "a path"
FUNCTION = "a function"
_FITS: Mapping[str, Callable[[Any], bool]] = {PATH: can_be_path, FUNCTION: callable}


def refuse_wrong(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raises an error if an argument is not what is expected. None means "not given", and is never wrong.

    Args:
        values: the arguments by name, as `locals()` has them at the begin of a function.
        rules: for each argument that is checked, a constraint (`forgather.rule_conditions.misfit`), `PATH` or
            `FUNCTION`.

    Raises:
        TrainingError: FG813 for the first argument that is wrong.

    Example:
        >>> refuse_wrong({"force": True, "step": 3}, {"force": FLAG, "step": COUNT_OR_0})
    """
    for name, rule in rules.items():
        value = values[name]
        if value is None:
            continue
        expected = misfit(value, rule) if isinstance(rule, Mapping) else None if _FITS[rule](value) else rule
        if expected is not None:
            raise TrainingError(
                f"{name} is {shown(value)}", code="FG813", hint=f"give {expected}", expected=expected, found=value
            ).about(name)


def refuse_without(method: str, values: Mapping[str, Any]) -> None:
    """Raises an error if an argument is given and lacks a method.

    Args:
        method: the name of the method.
        values: the arguments by name.

    Raises:
        TrainingError: FG819 for the first argument that lacks it.
    """
    for name, value in values.items():
        if value is not None and not callable(getattr(value, method, None)):
            raise TrainingError(
                f"{name} is a {type(value).__name__}, which has no {method}()",
                code="FG819",
                hint=f"give an object of torch, or leave {name} out",
            ).about(name)


def devices_of(value: Any) -> list[int | str]:
    """Returns the devices of an argument `devices`.

    Args:
        value: a list of numbers and names.

    Raises:
        TrainingError: FG813 if it is something else.
    """
    if isinstance(value, list | tuple | range) and all(type(one) in (int, str) for one in value):
        return list(value)
    raise TrainingError(
        f"devices is {shown(value)}", code="FG813", hint="give a list of numbers or names, as devices=[0, 1]"
    ).about("devices")
