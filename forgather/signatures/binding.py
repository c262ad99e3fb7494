"""The values that statements bind to a name.

The input is a list of statements and a name; the output is the list of all values that the name can have after the
statements have run. If a condition can only be decided at run time, the values of all branches are included.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class StatementFacts(Protocol):
    """Protocol for facts about statements that depend on other modules; `Scope` implements it."""

    def static_condition(self, test: ast.expr) -> bool | None:
        """Returns the value of a condition; None if the value is unknown without running code."""

    def importable(self, statement: ast.Import | ast.ImportFrom) -> bool | None:
        """Returns whether an import would succeed; None if this is unknown."""

    def value(self, statement: ast.stmt, name: str, expression: ast.expr | None) -> list[Any] | None:
        """Returns the possible values that a statement binds to a name; None if it does not bind the name."""

    def ordered(self, statements: Sequence[ast.stmt], name: str) -> Sequence[ast.stmt]:
        """Returns statements in an order in which a later binding of the name replaces an earlier one."""


Result = tuple[list[Any], bool]
"""The possible values of a name, and whether it is certainly bound."""


def bound_values(statements: Sequence[ast.stmt], name: str, judge: StatementFacts) -> Result:
    """Returns the possible values of a name after statements have run, and whether they certainly bind the name.

    Args:
        statements: the statements, in the order of the source.
        name: the name whose values are collected.
        judge: the object that knows about other modules, for example whether an import succeeds.
    """
    # From the last statement backwards: the last certain binding replaces all earlier ones.
    found: list[Any] = []
    # A branch that ends in `raise` does not continue, so it contributes no value.
    if statements and isinstance(statements[-1], ast.Raise):
        return found, True
    for statement in reversed(judge.ordered(statements, name)):
        alternatives, sure = _bound_by(statement, name, judge)
        found += alternatives
        if sure:
            return found, True
    return found, False


def _bound_by(statement: ast.stmt, name: str, judge: StatementFacts) -> Result:
    if isinstance(statement, ast.If):
        return _if(statement, name, judge)
    if isinstance(statement, ast.Try):
        return _try(statement, name, judge)
    if isinstance(statement, ast.With):
        return bound_values(statement.body, name, judge)
    if isinstance(statement, ast.For | ast.While | ast.AsyncFor):
        loop = bound_values([*statement.body, *statement.orelse], name, judge)[0]
        target = getattr(statement, "target", None)
        if target is not None and _position(target, name) is not None:
            loop = [*loop, *(judge.value(statement, name, None) or [])]
        # The body may never run, so the binding is not certain.
        return loop, False
    # Without a value, but certain: the values that were bound before are gone.
    if isinstance(statement, ast.Delete):
        return [], any(isinstance(target, ast.Name) and target.id == name for target in statement.targets)
    expression = None
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        positions = [p for target in targets if (p := _position(target, name)) is not None]
        # `x: int` declares a name without binding it.
        if not positions or statement.value is None:
            return [], False
        # The value of `x += y` depends on the old value of `x`, so it is treated as unknown.
        expression = None if isinstance(statement, ast.AugAssign) else _element(statement.value, positions[-1])
    elif not _binds(statement, name):
        return [], False
    values = judge.value(statement, name, expression)
    return (values, True) if values is not None else ([], False)


def _binds(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return statement.name == name
    if isinstance(statement, ast.Import):
        return any((alias.asname or alias.name.partition(".")[0]) == name for alias in statement.names)
    if isinstance(statement, ast.ImportFrom):
        return any((alias.asname or alias.name) == name or alias.name == "*" for alias in statement.names)
    if isinstance(statement, ast.Match):
        return any(name in (getattr(n, "id", None), getattr(n, "name", None)) for n in ast.walk(statement))
    return any(isinstance(n, ast.NamedExpr) and n.target.id == name for n in ast.walk(statement))


def _position(target: ast.expr, name: str) -> tuple[int, ...] | None:
    """Returns the path of indices from the target of an assignment to a name: () if the name is the whole target.

    Returns None if the target does not contain the name. An index of -1 stands for an unknown position, next to or
    inside a starred element.
    """
    if isinstance(target, ast.Name):
        return () if target.id == name else None
    if isinstance(target, ast.Starred):
        return (-1,) if _position(target.value, name) is not None else None
    if isinstance(target, ast.Tuple | ast.List):
        for index, element in enumerate(target.elts):
            inner = _position(element, name)
            if inner is not None:
                starred = any(isinstance(other, ast.Starred) for other in target.elts)
                return (-1,) if starred else (index, *inner)
    return None


def _element(value: ast.expr, position: tuple[int, ...]) -> ast.expr | None:
    for index in position:
        if not isinstance(value, ast.Tuple | ast.List) or not 0 <= index < len(value.elts):
            return None
        value = value.elts[index]
    return value


def _if(statement: ast.If, name: str, judge: StatementFacts) -> Result:
    static = judge.static_condition(statement.test)
    if static is not None:
        return bound_values(statement.body if static else statement.orelse, name, judge)
    first, first_sure = bound_values(statement.body, name, judge)
    second, second_sure = bound_values(statement.orelse, name, judge) if statement.orelse else ([], False)
    return first + second, first_sure and second_sure


def _try(statement: ast.Try, name: str, judge: StatementFacts) -> Result:
    # `finally` runs last, so a certain binding in it replaces all others.
    last, sure = bound_values(statement.finalbody, name, judge)
    if sure:
        return last, True
    imports = [s for s in statement.body if isinstance(s, ast.Import | ast.ImportFrom)]
    outcomes = [judge.importable(one) for one in imports]
    only_imports = bool(imports) and len(imports) == len(statement.body)
    # An import in the body certainly fails, so a handler decides.
    if False in outcomes:
        handled = [bound_values(handler.body, name, judge) for handler in statement.handlers]
        return last + [value for values, _ in handled for value in values], bool(handled) and all(s for _, s in handled)
    tried, tried_sure = bound_values([*statement.body, *statement.orelse], name, judge)
    # All imports certainly succeed, so no handler runs.
    if only_imports and all(outcomes):
        return last + tried, tried_sure
    handled = [bound_values(handler.body, name, judge) for handler in statement.handlers]
    values = last + tried + [value for alternatives, _ in handled for value in alternatives]
    return values, tried_sure and all(s for _, s in handled)


_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}


def static_condition(test: ast.expr, typing: bool) -> bool | None:
    """Returns the value of a condition; None if the value is unknown without running code.

    Args:
        test: the expression of the condition.
        typing: the value that `TYPE_CHECKING` has in the condition.
    """
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = static_condition(test.operand, typing)
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
