"""Tests whether a decorator keeps the signature of the function that it decorates.

The input is the source of a decorator; the output is whether the decorated function accepts the same calls as the
original. Only two forms pass the test: a decorator that returns its argument, and one that returns a wrapper which
passes all its arguments on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from forgather.signatures.symbols import Function

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CONSTRUCTING = frozenset(("__init__", "__new__", "__call__", "__signature__", "__class__", "__dict__"))


def walk_body(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yields the nodes of a function's body, without those of nested functions and classes."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))


def inner_functions(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns the functions that are defined inside a function, by name, without names that are bound several times."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    bound: set[str] = set()
    twice: set[str] = set()
    for inner in walk_body(node.body):
        name = None
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            name = inner.name
            found[name] = inner
        elif isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            name = inner.id
        if name is not None:
            twice |= {name} & bound
            bound.add(name)
    # Of several definitions, it is not known which one a `return` refers to.
    return {name: inner for name, inner in found.items() if name not in twice}


def keeps_signature(function: Function, called: bool) -> bool:
    """Returns whether the decorated function accepts the same calls as the original.

    Args:
        function: the decorator.
        called: whether the decorator is used with arguments (`@cached(3)`).
    """
    node = function.node
    if not called:
        return _returns_same_signature(node, _first(node))
    inner = inner_functions(node)
    returned = [n.value for n in walk_body(node.body) if isinstance(n, ast.Return)]
    if not returned:
        return False
    first = _first(node)
    for value in returned:
        if isinstance(value, ast.Name) and value.id in inner:
            if not _returns_same_signature(inner[value.id], _first(inner[value.id])):
                return False
        elif isinstance(value, ast.Call) and first and _is_inner_decorator_call(value, first, inner):
            continue
        else:
            return False
    return True


def returns_its_argument(function: Function) -> bool:
    """Returns whether a function returns its first argument, and does not change how that argument is constructed."""
    node = function.node
    first = _first(node)
    returned = [n.value for n in walk_body(node.body) if isinstance(n, ast.Return)]
    same = bool(returned) and all(isinstance(value, ast.Name) and value.id == first for value in returned)
    return same and first is not None and not _alters(node, first)


def attributes_set(function: Function) -> frozenset[str]:
    """Returns the attributes that a function sets on its first argument."""
    node = function.node
    first = _first(node)
    return frozenset(
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == first
    )


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    positional = [*node.args.posonlyargs, *node.args.args]
    return positional[0].arg if positional else None


def _alters(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Returns whether a function rebinds a name, or changes how the value of the name is constructed or called."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id == name and isinstance(inner.ctx, ast.Store | ast.Del):
            return True
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and inner.attr in _CONSTRUCTING:
            return True
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "setattr":
            target = inner.args[1] if len(inner.args) > 1 else None
            if not isinstance(target, ast.Constant) or target.value in _CONSTRUCTING:
                return True
    return False


def _returns_same_signature(node: ast.FunctionDef | ast.AsyncFunctionDef, given: str | None) -> bool:
    """Returns whether `node`, called with the callable named `given`, returns a callable of the same signature."""
    if given is None or _alters(node, given):
        return False
    inner = inner_functions(node)
    returned = [n.value for n in walk_body(node.body) if isinstance(n, ast.Return)]
    if not returned:
        return False
    for value in returned:
        if isinstance(value, ast.Name) and value.id == given:
            continue
        if isinstance(value, ast.Name) and value.id in inner and _forwards_all(inner[value.id], given):
            continue
        if isinstance(value, ast.Call) and _is_inner_decorator_call(value, given, inner):
            continue
        return False
    return True


def _is_inner_decorator_call(
    call: ast.Call, given: str, inner: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]
) -> bool:
    """Returns whether a call is `inner(given)`, where `inner` is a nested decorator that keeps the signature."""
    if not isinstance(call.func, ast.Name) or call.func.id not in inner or len(call.args) != 1 or call.keywords:
        return False
    argument, decorator = call.args[0], inner[call.func.id]
    return (
        isinstance(argument, ast.Name)
        and argument.id == given
        and _returns_same_signature(decorator, _first(decorator))
    )


def _forwards_all(wrapper: ast.FunctionDef | ast.AsyncFunctionDef, given: str) -> bool:
    """Returns whether a wrapper accepts any arguments and passes exactly these arguments to `given`."""
    args = wrapper.args
    if args.vararg is None or args.kwarg is None or args.kwonlyargs:
        return False
    first = [a.arg for a in (*args.posonlyargs, *args.args)]
    star, stars = args.vararg.arg, args.kwarg.arg
    if len(first) > 1 or args.defaults:
        return False
    # A wrapper with one named parameter is one for methods, which passes `self` on.
    calls = [n for n in ast.walk(wrapper) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    passes = [
        _is_forwarding_call(call, given, first, star, stars) for call in calls if getattr(call.func, "id", "") == given
    ]
    if not passes or not all(passes) or _swallows_errors(wrapper, given):
        return False
    uses = sum(isinstance(n, ast.Name) and n.id in (star, stars) for n in ast.walk(wrapper))
    # `*args` and `**kwargs` may be passed to other calls; any other use of them may change them.
    copies = sum(
        isinstance(n, ast.Starred | ast.keyword) and isinstance(n.value, ast.Name) and n.value.id in (star, stars)
        for n in ast.walk(wrapper)
        if not isinstance(n, ast.keyword) or n.arg is None
    )
    return uses == copies


def _swallows_errors(wrapper: ast.FunctionDef | ast.AsyncFunctionDef, given: str) -> bool:
    """Returns whether a wrapper may return normally although `given` raised an exception, as for wrong arguments."""
    for node in ast.walk(wrapper):
        if isinstance(node, ast.Try) and not all(isinstance(h.body[-1], ast.Raise) for h in node.handlers):
            if any(isinstance(n, ast.Name) and n.id == given for s in node.body for n in ast.walk(s)):
                return True
    return False


def _is_forwarding_call(call: ast.Call, given: str, first: list[str], star: str, stars: str) -> bool:
    if not isinstance(call.func, ast.Name) or call.func.id != given or len(call.keywords) != 1:
        return False
    keyword, *starred = call.keywords[0], *call.args
    if keyword.arg is not None or not isinstance(keyword.value, ast.Name) or keyword.value.id != stars:
        return False
    if not starred:
        return False
    *named, last = starred
    if not isinstance(last, ast.Starred) or not isinstance(last.value, ast.Name) or last.value.id != star:
        return False
    return [n.id for n in named if isinstance(n, ast.Name)] == first and len(named) == len(first)
