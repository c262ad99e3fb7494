"""Passes over finished statements.

Takes statements, gives statements that do the same.
"""

from __future__ import annotations

import ast

from forgather.codegen.python.text import Expression, Statement, layout


def without_unused(statements: list[Statement]) -> list[Statement]:
    """Returns the statements without variables that nothing reads; what their values call is still called."""
    while _drop(statements, names_read(statements)):
        pass
    return statements


def names_read(statements: list[Statement]) -> set[str]:
    """Returns the names that statements read."""
    tree = ast.parse("def build():\n" + "\n".join(layout(statements, "    ")))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _drop(statements: list[Statement], read: set[str]) -> bool:
    changed = False
    for position, statement in reversed(list(enumerate(statements))):
        changed |= _drop(statement.body, read)
        if statement.expression is None:
            if not statement.body or _is_unread(statement, read):
                changed = True
                del statements[position]
        elif statement.before.endswith(" = ") and statement.before[:-3].partition(".")[0] not in {*read, "_"}:
            changed, statement.before = True, unused(statement.expression)
            if statement.expression.pure:
                del statements[position]
    return changed


def unused(expression: Expression) -> str:
    """Returns what stands before an expression whose value nothing needs."""
    return "" if expression.text.endswith(")") else "_ = "


def _is_unread(statement: Statement, read: set[str]) -> bool:
    return statement.is_function and statement.heads[-1][4:].partition("(")[0] not in read
