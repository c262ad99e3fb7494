"""Conditions that the interpreter decides.

Takes the test of an `if`, gives whether it holds. Keeps true: what depends on anything but Python is not decided.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable
from typing import Any

_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}


def static(test: ast.expr, typing: bool) -> bool | None:
    """Returns what a condition is; None where that is not known before anything runs.

    Args:
        test: the condition.
        typing: what `TYPE_CHECKING` is.
    """
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = static(test.operand, typing)
        return None if inner is None else not inner
    if isinstance(test, ast.Name | ast.Attribute):
        name = test.id if isinstance(test, ast.Name) else test.attr
        return typing if name == "TYPE_CHECKING" else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _COMPARED:
        return _compared(ast.unparse(test.left), test.ops[0], test.comparators[0])
    return None


def _compared(left: str, comparison: ast.cmpop, right: ast.expr) -> bool | None:
    try:
        value = ast.literal_eval(right)
    except ValueError:
        return None
    actual: object
    if left == "sys.version_info" and isinstance(value, tuple):
        actual = tuple(sys.version_info)
    elif left == "sys.platform" and isinstance(value, str):
        actual = sys.platform
    else:
        return None
    return bool(_COMPARED[type(comparison)](actual, value))
