"""Conditions on runs, as in `--where optimizer.lr<1e-3`.

The input is the text of a condition; the output is a `Condition`, which decides about single values. A value that a run
does not have fulfills no condition.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forgather.errors import ProjectError
from forgather.runs.config_values import Value, plain_value

_FORM = re.compile(r"\s*([^=<>!~]+?)\s*(==|!=|<=|>=|=(?!\s*[<>]\s*[-+.0-9])|<|>|~)\s*(.*?)\s*", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_DURATION = re.compile(r"([0-9.]+)\s*(s|min|m|h|d)")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Condition:
    """A condition on one value of a run.

    Args:
        name: the name of the value, as the user wrote it.
        operator: one of `=`, `!=`, `<`, `<=`, `>`, `>=` and `~` (a regular expression).
        operand: the text after the operator.
    """

    name: str
    operator: str
    operand: str

    def fits(self, value: Value, *, is_duration: bool = False) -> bool:
        """Returns whether a value fulfills the condition.

        Two numbers are compared as numbers, everything else as text.

        Args:
            value: the value.
            is_duration: whether the value is a number of seconds, so that the operand may be `10m` or `2h`.
        """
        if self.operator == "~":
            return re.search(self.operand, as_text(value)) is not None
        operand = self._operand(is_duration=is_duration)
        if _is_number(value) and _is_number(operand):
            left, right = value, operand
        elif self.operator in _ORDERS and (_is_number(value) or _is_number(operand)):
            return False  # a number and a text have no order
        else:
            # A number is compared with a text as it was written, such as a tag `01`.
            left, right = as_text(value), self.operand if _is_number(operand) else as_text(operand)
        if self.operator in _ORDERS:
            return _ORDERS[self.operator](left, right)
        return (left == right) == (self.operator == "=")

    def refuse_unordered(self, values: Sequence[Value], *, is_duration: bool = False) -> None:
        """Raises an error if the condition asks for an order that no value has with its operand.

        An empty list would look as if no run had such a value.

        Args:
            values: the values of the runs that have one.
            is_duration: whether the values are numbers of seconds.

        Raises:
            ProjectError: FG502 if either the operand or the values are numbers, and the other side is none.
        """
        is_number = _is_number(self._operand(is_duration=is_duration))
        if self.operator not in _ORDERS or not values or any(_is_number(value) is is_number for value in values):
            return
        example = as_text(values[0])
        what = (
            "is a number, and the values of {0} are not" if is_number else "is not a number, and the values of {0} are"
        )
        as_words = f"'{self.name}{self.operator}\"{self.operand}\"' compares texts"
        as_time = "write seconds, or 10m, 2h, 1d" if is_duration else "write one number: 1e-3"
        raise ProjectError(
            f"{self.operand!r} {what.format(repr(self.name))}, such as {example}",
            code="FG502",
            hint=as_words if is_number else as_time,
        )

    def _operand(self, *, is_duration: bool) -> Value:
        match = _DURATION.fullmatch(self.operand) if is_duration else None
        if match is None:
            # As Python prints it, which YAML does not read.
            return None if self.operand == "None" else plain_value(self.operand)
        try:
            return float(match[1]) * _UNITS[match[2]]
        except ValueError:
            return self.operand


def parse_condition(text: str) -> Condition:
    """Returns the condition that a text states.

    Raises:
        ProjectError: FG502 if the text is no condition.

    Example:
        >>> parse_condition("optimizer.lr<1e-3")
        Condition(name='optimizer.lr', operator='<', operand='1e-3')
    """
    match = _FORM.fullmatch(text)
    if match is None or (not match[3] and match[2] not in ("=", "==", "!=")):
        raise ProjectError(
            f"{text!r} is not a condition",
            code="FG502",
            hint="write NAME, an operator (= != < <= > >= ~) and a value, in quotes: --where 'optimizer.lr<1e-3'",
        )
    found = Condition(match[1], match[2].replace("==", "="), match[3])
    if found.operator == "~":
        try:
            re.compile(found.operand)
        except (re.error, RecursionError, OverflowError) as error:
            raise ProjectError(
                f"{found.operand!r} is not a regular expression: {error}",
                code="FG502",
                hint="a backslash before a special character takes it as it is",
            ) from None
    return found


def as_text(value: Value) -> str:
    """Returns a value as a table shows it.

    Example:
        >>> [as_text(value) for value in (None, True, 0.001, "adamw")]
        ['null', 'true', '0.001', 'adamw']
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
