"""Checks of the values that a constructor gets, by the rules that the check before a run reads.

The input is a constructor's name and its arguments; the output is an `ArgumentValueError` for the first value that the
rules refuse. A config is checked before anything is built; a constructor makes the same check for values that are known
only then, and for callers in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgather.errors import TrainingError
from forgather.rules import shipped_rules


class ArgumentValueError(TrainingError, ValueError):
    """An error about an argument whose value has the wrong type or is out of range."""

    code = "FG813"


def refuse_wrong_values(constructor: str, values: Mapping[str, Any]) -> None:
    """Raises an error if an argument of a constructor has a value that its rules do not allow.

    Args:
        constructor: the constructor, as configs write it, without `forgather.ml.`: "data:split".
        values: the arguments by name, as `locals()` has them at the begin of a function. Names without a rule are not
            checked.

    Raises:
        ArgumentValueError: FG813, or the code that the rules give for this argument.

    Example:
        >>> refuse_wrong_values("data:split", {"eval_fraction": 0.1, "seed": 42})
    """
    for rules in shipped_rules()[f"forgather.ml.{constructor}"]:
        for found in rules.values(values):
            raise ArgumentValueError(
                found.message, code=found.code, hint=found.hint, expected=found.expected, found=found.found
            ).about(found.argument)
