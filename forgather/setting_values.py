"""What a value of a setting may be: the words of a rule, and what they accept.

Takes a value and the rule of its setting, gives what was expected where it does not fit. Keeps true: one table of
words; each has what it accepts and how a message calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any


def misfit(value: Any, rule: Mapping[str, Any]) -> str | None:
    """Returns what was expected where a value does not fit; None where it fits.

    Args:
        value: what is given.
        rule: `type` is "text", "flag", "whole", "number", "steps", "mapping", "word", "texts", "list", "any", or
            several; `minimum`, `maximum` and `below` bound a number; `choices` lists the words (of "texts", too);
            `also` lists further values; `keys` are the settings of a mapping, `open` where it may have more, `instead`
            what to do in place of others; `optional` accepts None; `expected` says it in other words. (`severity` says
            how bad it is: a warning where another release of the library may know more words.)

    Example:
        >>> misfit(0, {"type": "whole", "minimum": 1})
        'a whole number from 1'
    """
    if (value is None and rule.get("optional")) or _listed(value, rule.get("also", ())):
        return None
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    if any(_FITS[kind](value, rule) for kind in kinds):
        return None
    expected: str | None = rule.get("expected")
    return expected or " or ".join(_EXPECTED[kind](rule) for kind in kinds)


def _listed(value: Any, further: Collection[Any]) -> bool:
    return not isinstance(value, bool) and any(type(value) is type(other) and value == other for other in further)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _in_range(value: Any, rule: Mapping[str, Any]) -> bool:
    lowest, highest = rule.get("minimum", value), rule.get("maximum", value)
    return bool(lowest <= value <= highest) and not ("below" in rule and value >= rule["below"])


def _is_steps(value: Any) -> bool:
    return _is_number(value) and value > 0 and (value < 1 or (value != float("inf") and value == int(value)))


def _number_expected(rule: Mapping[str, Any]) -> str:
    words = [f"a number from {rule['minimum']:g}"] if "minimum" in rule else ["a number"]
    words += [f"{word} {rule[key]:g}" for key, word in (("maximum", "to"), ("below", "below")) if key in rule]
    return " ".join(words)


_FITS: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "text": lambda value, rule: isinstance(value, str) and value != "" and "\0" not in value,
    "texts": lambda value, rule: (
        isinstance(value, list | tuple)
        and all(isinstance(item, str) and item in rule.get("choices", (item,)) for item in value)
    ),
    "list": lambda value, rule: isinstance(value, list | tuple),
    "flag": lambda value, rule: isinstance(value, bool),
    "whole": lambda value, rule: isinstance(value, int) and not isinstance(value, bool) and _in_range(value, rule),
    "number": lambda value, rule: _is_number(value) and _in_range(value, rule),
    "steps": lambda value, rule: _is_steps(value),
    "mapping": lambda value, rule: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    "word": lambda value, rule: isinstance(value, str) and value in rule["choices"],
    "any": lambda value, rule: True,
}
_EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "text": lambda rule: "a text",
    "texts": lambda rule: f"a list of: {', '.join(rule['choices'])}" if "choices" in rule else "a list of texts",
    "list": lambda rule: "a list",
    "flag": lambda rule: "true or false",
    "whole": lambda rule: _number_expected(rule).replace("a number", "a whole number"),
    "number": _number_expected,
    "steps": lambda rule: "a whole number of steps from 1, or a share of all steps between 0 and 1",
    "mapping": lambda rule: "a mapping",
    "word": lambda rule: "one of: " + ", ".join(rule["choices"]),
    "any": lambda rule: "any value",
}
