"""Conditions and value constraints of rules: a small expression language, evaluated on known settings.

`holds` takes a condition and settings by name; it gives True, False or `UNKNOWN`. `misfit` takes a value and its
constraint; it gives a description of what was expected. No code is compiled or executed, and no attribute of an object
is read. A condition that depends on an unknown setting is `UNKNOWN`.
"""

from __future__ import annotations

import ast
import functools
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from forgather.value_text import can_be_path


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


class _Something:
    def __repr__(self) -> str:
        return "SOMETHING"


UNKNOWN: Final = _Unknown()
"""A value that is not known before the run."""
SOMETHING: Final = _Something()
"""A value of which nothing is known except that it is not None."""
AUTO: Final = "auto"
"""The value of a setting with `found`, which `fgcli train` replaces by a number before the run."""
LARGEST_WHOLE: Final = 2**63 - 1
"""The largest whole number that a setting may have."""

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda left, right: left in right, ast.NotIn: lambda left, right: left not in right,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "round": round, "len": len}


def holds(condition: str, facts: Mapping[str, Any]) -> Any:
    """Returns whether a condition is true: True, False, or `UNKNOWN` if the answer depends on an unknown setting.

    A condition is a Python expression of names (also `args.lr`), literals, `and or not`, comparisons, `in`, arithmetic,
    `abs`, `round` and `len`. `x and y` is False if one operand is False, even if the other operand is unknown.

    Args:
        condition: the expression.
        facts: the settings, by name; a name that is missing is an unknown setting.

    Raises:
        ValueError: if the expression contains another construct.

    Example:
        >>> holds("save_steps % eval_steps != 0", {"save_steps": 6, "eval_steps": 4})
        True
        >>> holds("a == None and b > 1", {"a": 1, "b": UNKNOWN})
        False
    """
    value = _value(_parsed(condition), facts)
    return value if value is UNKNOWN else bool(value)


def names_of(condition: str) -> list[str]:
    """Returns the names of the settings that a condition reads, in arbitrary order."""
    tree = _parsed(condition)
    # `args.lr` is one name: the node `args` inside it is not a setting of its own.
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return list(dict.fromkeys(_dotted(node) for node in found if id(node) not in inner | called))


@functools.cache
def _parsed(condition: str) -> ast.expr:
    # ast.parse compiles nothing; `_value` interprets the tree.
    return ast.parse(condition, mode="eval").body


def _dotted(node: ast.expr) -> str:
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _value(node: ast.expr, facts: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            return facts.get(_dotted(node), UNKNOWN)
        case ast.Tuple() | ast.List():
            return _strict(tuple, [_value(item, facts) for item in node.elts])
        case ast.BoolOp():
            return _boolean(node, facts)
        case ast.UnaryOp(op=ast.Not()):
            return _truth(_value(node.operand, facts), lambda value: not value)
        case ast.UnaryOp(op=ast.USub()):
            return _strict(lambda values: -values[0], [_value(node.operand, facts)])
        case ast.BinOp():
            return _apply(node.op, _value(node.left, facts), _value(node.right, facts))
        case ast.Compare(ops=[operation], comparators=[right]):
            return _apply(operation, _value(node.left, facts), _value(right, facts))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _strict(lambda values: _FUNCTIONS[name](*values), [_value(arg, facts) for arg in node.args])
    raise ValueError(f"a rule cannot say {ast.unparse(node)!r}")


def _boolean(node: ast.BoolOp, facts: Mapping[str, Any]) -> Any:
    # Three-valued logic: one True decides `or`, and one False decides `and`.
    decides = isinstance(node.op, ast.Or)
    unknown = False
    for part in node.values:
        value = _truth(_value(part, facts), bool)
        if value is decides:
            return decides
        unknown = unknown or value is UNKNOWN
    return UNKNOWN if unknown else not decides


def _truth(value: Any, of: Callable[[Any], bool]) -> Any:
    return UNKNOWN if value is UNKNOWN or value is SOMETHING else of(value)


def _apply(operation: ast.operator | ast.cmpop, left: Any, right: Any) -> Any:
    # `SOMETHING == None` is known to be False, although the value is not known.
    with_none = left is None or right is None
    if with_none and (left is SOMETHING or right is SOMETHING) and isinstance(operation, ast.Eq | ast.NotEq):
        return isinstance(operation, ast.NotEq)
    return _strict(lambda values: _BINARY[type(operation)](*values), [left, right])


def _strict(compute: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """Returns the result of a computation on known values; `UNKNOWN` if a value is unknown or of a wrong type.

    The constraint of the setting itself reports a wrong type.
    """
    if any(value is UNKNOWN or value is SOMETHING for value in values):
        return UNKNOWN
    try:
        return compute(values)
    except (TypeError, ArithmeticError):
        return UNKNOWN


def misfit(value: Any, rule: Mapping[str, Any]) -> str | None:
    """Returns a description of what was expected if a value violates its constraint; None if the value is accepted.

    Args:
        value: the value of the setting.
        rule: the constraint, a mapping. Its key `type` is "text", "path", "flag", "whole", "number", "steps",
            "mapping", "word", "texts", "list" or "any", or a list of these words. The keys `minimum`, `above`,
            `maximum` and `below` limit a number, which is always finite. `choices` lists the accepted words (also for
            "texts"), and
            `also` lists further accepted values. `optional` accepts None. `expected` replaces the generated
            description. This function does not read the other keys: `keys` are the settings of a mapping, of which
            `open` allows further ones, and `instead` gives hints for some; `each` is the constraint of the items of a
            list or mapping; `unavailable` gives reasons for words of another library; `code` is the error code; `found`
            says that `AUTO` is replaced before a run; `severity` is a warning if another release of a library may
            accept more words.

    Example:
        >>> misfit(0, {"type": "whole", "minimum": 1})
        'a whole number from 1'
    """
    if (value is None and rule.get("optional")) or _listed(value, rule.get("also", ())):
        return None
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    if any(_FITS[kind](value, rule) for kind in kinds):
        return None
    return _expected(rule, kinds)


def accepted_values(rule: Mapping[str, Any]) -> str:
    """Returns a description, in words, of the values that a constraint accepts.

    Example:
        >>> accepted_values({"type": "whole", "minimum": 1, "also": [-1]})
        'a whole number from 1, or -1'
    """
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    further = [*map(repr, rule.get("also", ())), *(["null"] if rule.get("optional") else [])]
    return ", or ".join([_expected(rule, kinds), *further])


def _expected(rule: Mapping[str, Any], kinds: Sequence[str]) -> str:
    expected: str | None = rule.get("expected")
    return expected or " or ".join(_EXPECTED[kind](rule) for kind in kinds)


def _listed(value: Any, further: Collection[Any]) -> bool:
    # True equals 1 in Python, and 1.0 equals 1.
    return not isinstance(value, bool) and any(type(value) is type(other) and value == other for other in further)


def _is_number(value: Any) -> bool:
    # NaN is not below any limit. torch, `islice` and JSON files of other programs have no longer whole numbers.
    most = LARGEST_WHOLE if isinstance(value, int) else sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= most


def _in_range(value: Any, rule: Mapping[str, Any]) -> bool:
    lowest, highest = rule.get("minimum", value), rule.get("maximum", value)
    is_inside = "above" not in rule or value > rule["above"]
    return bool(is_inside and lowest <= value <= highest) and not ("below" in rule and value >= rule["below"])


def _is_steps(value: Any) -> bool:
    # transformers reads a number below 1 as a fraction of all steps.
    return _is_number(value) and value > 0 and (value < 1 or value == int(value))


def _number_expected(rule: Mapping[str, Any]) -> str:
    limits = (("minimum", "from"), ("above", "above"), ("maximum", "to"), ("below", "below"))
    return " ".join(["a number", *(f"{word} {rule[key]:.10g}" for key, word in limits if key in rule)])


_FITS: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    # No path may contain NUL.
    "text": lambda value, rule: isinstance(value, str) and value != "" and "\0" not in value,
    "path": lambda value, rule: can_be_path(value),
    "texts": lambda value, rule: (
        isinstance(value, list | tuple)
        and all(isinstance(item, str) and item in rule.get("choices", (item,)) for item in value)
    ),
    "list": lambda value, rule: isinstance(value, list | tuple),
    "flag": lambda value, rule: isinstance(value, bool),
    "whole": lambda value, rule: isinstance(value, int) and _is_number(value) and _in_range(value, rule),
    "number": lambda value, rule: _is_number(value) and _in_range(value, rule),
    "steps": lambda value, rule: _is_steps(value),
    "mapping": lambda value, rule: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    "word": lambda value, rule: isinstance(value, str) and value in rule["choices"],
    "any": lambda value, rule: True,
}
_EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "text": lambda rule: "a text",
    "path": lambda rule: "a path",
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
