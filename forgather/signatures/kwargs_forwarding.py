"""Where a function hands its `**kwargs` and `*args` on.

Takes a function in source, gives the calls that get its keywords, and the names that it takes out itself. Keeps true:
it is `closed` only where every keyword surely reaches one of those calls, or is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from forgather.signatures.decorators import walk_own

_TAKING = ("pop", "get", "setdefault")


@dataclass
class Handing:
    """What becomes of the keywords of a function.

    Args:
        closed: whether each keyword is taken out by name, or handed on to one of `calls`.
        names: taken out by name.
        calls: what gets the others.
        sure: whether there is one call, and it is always reached.
        filled: whether the function adds or changes keywords before it hands them on.
    """

    closed: bool = False
    names: dict[str, ast.expr | None] = field(default_factory=dict)
    calls: list[ast.Call] = field(default_factory=list)
    sure: bool = False
    filled: bool = False


def handing_of(node: ast.FunctionDef | ast.AsyncFunctionDef, stars: str) -> Handing:
    """Returns what becomes of the keywords that `**stars` takes."""
    handing = Handing()
    known: set[int] = set()
    for inner in walk_own(node.body):
        if isinstance(inner, ast.Call):
            _read_call(inner, stars, handing, known)
        elif isinstance(inner, ast.Subscript) and _is(inner.value, stars):
            if not isinstance(inner.slice, ast.Constant) or not isinstance(inner.slice.value, str):
                return Handing()
            known.add(id(inner.value))
            handing.names.setdefault(inner.slice.value, None)
            handing.filled |= not isinstance(inner.ctx, ast.Load)
        elif isinstance(inner, ast.Compare) and _is(inner.comparators[-1], stars) and len(inner.ops) == 1:
            if isinstance(inner.left, ast.Constant) and isinstance(inner.ops[0], ast.In | ast.NotIn):
                known.add(id(inner.comparators[-1]))
                handing.names.setdefault(str(inner.left.value), None)
    refused = _refuses_rest(node, stars, known)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id == stars and id(inner) not in known:
            return Handing()
    reached = [_surely(node.body, call) for call in handing.calls]
    handing.closed = refused or any(reached)
    handing.sure = reached == [True]
    return handing


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _read_call(call: ast.Call, stars: str, handing: Handing, known: set[int]) -> None:
    for keyword in call.keywords:
        if keyword.arg is None and _is(keyword.value, stars):
            known.add(id(keyword.value))
            handing.calls.append(call)
    function = call.func
    if isinstance(function, ast.Attribute) and _is(function.value, stars):
        first = call.args[0] if call.args else None
        if function.attr in _TAKING and isinstance(first, ast.Constant) and isinstance(first.value, str):
            known.add(id(function.value))
            default = call.args[1] if len(call.args) > 1 else None
            handing.names[first.value] = default
            handing.filled |= function.attr == "setdefault"


def _refuses_rest(node: ast.FunctionDef | ast.AsyncFunctionDef, stars: str, known: set[int]) -> bool:
    """Returns whether a function raises where keywords are left over: `if kwargs: raise`."""
    refuses = False
    for statement in node.body:
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise):
            test = statement.test
            if isinstance(test, ast.Call) and _is(test.func, "len") and len(test.args) == 1:
                test = test.args[0]
            if _is(test, stars):
                known.update(id(n) for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == stars)
                refuses = True
        if _may_leave(statement) and not refuses:
            return False
    return refuses


def _may_leave(statement: ast.stmt) -> bool:
    return any(isinstance(n, ast.Return | ast.Yield | ast.YieldFrom) for n in walk_own([statement]))


def _surely(body: list[ast.stmt], call: ast.Call) -> bool:
    """Returns whether a call is reached whenever the body runs to its end."""
    for statement in body:
        if isinstance(statement, ast.With | ast.AsyncWith):
            if _surely(statement.body, call) and not _may_swallow(statement):
                return True
        elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
            if statement.value is not None and _at_once(statement.value, call):
                return True
        if _may_leave(statement):
            return False
    return False


def _may_swallow(statement: ast.With | ast.AsyncWith) -> bool:
    """Returns whether a `with` may go on after what its body raises, as `contextlib.suppress` does."""
    return any("suppress" in ast.unparse(item.context_expr) for item in statement.items)


def _at_once(expression: ast.expr, call: ast.Call) -> bool:
    """Returns whether a call is part of an expression, and no condition stands before it."""
    if expression is call:
        return True
    if isinstance(expression, ast.IfExp | ast.BoolOp | ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.DictComp):
        return False
    return any(_at_once(inner, call) for inner in ast.iter_child_nodes(expression) if isinstance(inner, ast.expr))


def is_local(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Returns whether a name is bound inside of a function."""
    bound: frozenset[str] | None = getattr(node, "bound_names", None)
    if bound is None:
        bound = frozenset(_bound_names(node))
        node.bound_names = bound  # type: ignore[union-attr]
    return name in bound


def _bound_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    args = node.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
    yield from (argument.arg for argument in named)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            if not isinstance(inner.ctx, ast.Load):
                yield inner.id
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in inner.names)
        elif isinstance(inner, ast.FunctionDef | ast.ClassDef) and inner is not node:
            yield inner.name
