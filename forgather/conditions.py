"""Conditions on settings: a closed little language, evaluated on what is known.

Takes a condition and facts by name, gives True, False or `UNKNOWN`. Keeps true: nothing is compiled or run, no
attribute of an object is read, and what hangs on an unknown value is unknown, never a guess.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


class _Something:
    def __repr__(self) -> str:
        return "SOMETHING"


UNKNOWN: Final = _Unknown()
"""A value that is not known before the run."""
SOMETHING: Final = _Something()
"""A value of which it is known only that it is not None."""

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda left, right: left in right, ast.NotIn: lambda left, right: left not in right,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "round": round, "len": len}


def holds(condition: str, facts: Mapping[str, Any]) -> Any:
    """Returns whether a condition holds: True, False, or `UNKNOWN` where that hangs on a setting that is not known.

    A condition is written as Python writes it, of names (`args.lr` too), literals, `and or not`, comparisons, `in`,
    arithmetic, `abs`, `round` and `len`. `x and y` is False as soon as one of them is, known or not.

    Example:
        >>> holds("save_steps % eval_steps != 0", {"save_steps": 6, "eval_steps": 4})
        True
        >>> holds("a == None and b > 1", {"a": 1, "b": UNKNOWN})
        False
    """
    value = _value(_parsed(condition), facts)
    return value if value is UNKNOWN else bool(value)


def names_of(condition: str) -> list[str]:
    """Returns the settings that a condition reads, in no order."""
    tree = _parsed(condition)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return list(dict.fromkeys(_dotted(node) for node in found if id(node) not in inner | called))


@functools.cache
def _parsed(condition: str) -> ast.expr:
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
    with_none = left is None or right is None
    if with_none and (left is SOMETHING or right is SOMETHING) and isinstance(operation, ast.Eq | ast.NotEq):
        return isinstance(operation, ast.NotEq)
    return _strict(lambda values: _BINARY[type(operation)](*values), [left, right])


def _strict(compute: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """Computes on known values; what cannot be computed (a wrong type, said elsewhere) is not known either."""
    if any(value is UNKNOWN or value is SOMETHING for value in values):
        return UNKNOWN
    try:
        return compute(values)
    except (TypeError, ArithmeticError):
        return UNKNOWN
