"""The parameters of functions in source code, and the calls to which functions pass their `*args` and `**kwargs`.

The input is the syntax tree of a function; the output is its parameters in call order, and how the function uses its
keywords. Parameters that are merged from several functions accept at least the calls that Python accepts. A
`KeywordForwarding` is `closed` only if every keyword is either refused, or certainly passed to one of the forwarding
calls.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from forgather.signatures.decorators import walk_body
from forgather.signatures.results import UNKNOWN, Annotation, Default

POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
STAR = inspect.Parameter.VAR_POSITIONAL
KEYWORD = inspect.Parameter.KEYWORD_ONLY
STARS = inspect.Parameter.VAR_KEYWORD
OPTIONAL = Default("...")


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a function; unlike `inspect.Parameter`, it is not validated, so that creating one is fast."""

    name: str
    kind: inspect._ParameterKind
    default: Default | None = None
    annotation: Annotation | None = None

    @property
    def is_named(self) -> bool:
        """Whether the parameter can be given by keyword."""
        return self.kind in (EITHER, KEYWORD)

    @property
    def is_positional(self) -> bool:
        """Whether the parameter can be given by position."""
        return self.kind in (EITHER, POSITIONAL)


Describe = Callable[[ast.expr | None], Annotation | None]


def parameters_of(arguments: ast.arguments, describe: Describe) -> list[Param]:
    """Returns the parameters of a function.

    Args:
        arguments: the parameters in the syntax tree.
        describe: the function that returns the `Annotation` of an expression.
    """
    found: list[Param] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    defaults = [None] * missing + list(arguments.defaults)
    for index, (argument, expression) in enumerate(zip(positional, defaults, strict=True)):
        kind = POSITIONAL if index < len(arguments.posonlyargs) else EITHER
        found.append(_param(argument, kind, expression, describe))
    if arguments.vararg:
        found.append(Param(arguments.vararg.arg, STAR))
    for argument, expression in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_param(argument, KEYWORD, expression, describe))
    if arguments.kwarg:
        found.append(Param(arguments.kwarg.arg, STARS))
    return found


def _param(argument: ast.arg, kind: inspect._ParameterKind, expression: ast.expr | None, describe: Describe) -> Param:
    default = None if expression is None else default_of(expression)
    annotation = describe(argument.annotation)
    return Param(argument.arg, kind, default, with_default(annotation, default))


def with_default(annotation: Annotation | None, default: Default | None) -> Annotation | None:
    """Returns an annotation that also accepts the parameter's default.

    For `x: int = None`, None is added to the accepted values. An annotation that excludes any other default is replaced
    by one that accepts any value.
    """
    if annotation is None or annotation.accepts is None or default is None or default.value is UNKNOWN:
        return annotation
    word = "none" if default.value is None else type(default.value).__name__
    # `x: int = None` is common, and means that None is accepted, too.
    if word == "none":
        return Annotation(annotation.text, annotation.accepts | {"none"})
    return annotation if word in annotation.accepts else Annotation(annotation.text)


def default_of(expression: ast.expr) -> Default:
    """Returns the default of a parameter from its expression; its value is `UNKNOWN` if it is not a literal."""
    if isinstance(expression, ast.Constant):
        known = expression.value is not Ellipsis and not isinstance(expression.value, complex)
        return Default(repr(expression.value), expression.value if known else UNKNOWN)
    try:
        value: object = ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = UNKNOWN
    return Default(ast.unparse(expression), value)


def merged(own: Sequence[Param], names: Sequence[Param], *, star: Sequence[Param] | None, stars: bool) -> list[Param]:
    """Returns the parameters of a function that passes its `*args` and `**kwargs` on.

    Args:
        own: the parameters that the function declares.
        names: the parameters that the function's `**kwargs` can fill.
        star: the parameters that the function's `*args` can fill, in order; None to keep `*args`.
        stars: whether the function's `**kwargs` accept other names, too.
    """
    taken = {p.name for p in own if p.is_named}
    hidden = {p.name for p in own if p.kind is POSITIONAL}
    positional = [p for p in own if p.is_positional]
    keyword = [p for p in own if p.kind is KEYWORD]
    more = list(star or ())
    optional = any(p.default is not None for p in positional)
    for param in more:
        if param.name in taken or not param.is_positional:
            continue
        taken.add(param.name)
        # Python refuses a required parameter after an optional one.
        default = param.default or (OPTIONAL if optional else None)
        optional = optional or default is not None
        positional.append(replace(param, default=default))
    for param in names:
        if param.name in hidden:
            # In `def f(a, /, **more)` the keyword `a` is not the parameter, and goes to `more`.
            stars = True
        elif param.name not in taken and param.is_named:
            taken.add(param.name)
            keyword.append(replace(param, kind=KEYWORD))
    result = sorted(positional, key=lambda p: p.kind)
    if star is None:
        result += [p for p in own if p.kind is STAR]
    else:
        result += [p for p in more if p.kind is STAR][:1]
    result += keyword
    if stars:
        result += [p for p in own if p.kind is STARS] or [Param("kwargs", STARS)]
    return [_without_name_clash(p, taken | hidden) for p in result]


def _without_name_clash(param: Param, names: Collection[str]) -> Param:
    """Returns a parameter; `*args` or `**kwargs` is renamed if its name is one of the given names.

    The name of such a parameter has no effect on calls.
    """
    if param.kind not in (STAR, STARS):
        return param
    name = param.name
    while name in names:
        name += "_"
    return replace(param, name=name)


def without_first(params: Sequence[Param], count: int = 1) -> list[Param] | None:
    """Returns parameters without the first `count` positional ones; None if there are fewer than `count`.

    Args:
        params: the parameters of a function.
        count: the number of positional arguments that are already given.
    """
    rest = list(params)
    for _ in range(count):
        if rest and rest[0].is_positional:
            del rest[0]
        # `*args` takes any number of further arguments.
        elif not rest or rest[0].kind is not STAR:
            return None
    return rest


def as_signature(params: Sequence[Param]) -> inspect.Signature:
    """Returns the signature with the given parameters.

    Raises:
        ValueError: if the parameters contradict each other, as two parameters of the same name do.
    """
    empty = inspect.Parameter.empty
    made = [
        inspect.Parameter(
            p.name,
            p.kind,
            default=empty if p.default is None else p.default,
            annotation=empty if p.annotation is None else p.annotation,
        )
        for p in params
    ]
    return inspect.Signature(made)


def accepting_anything(params: Sequence[Param]) -> list[Param]:
    """Returns parameters that accept any call: `*args`, the given names as optional keywords, and `**kwargs`."""
    named = [replace(p, kind=KEYWORD, default=p.default or OPTIONAL) for p in params if p.is_named]
    return [Param("args", STAR), *named, Param("kwargs", STARS)]


def remaining_after(call: ast.Call, target: Sequence[Param]) -> list[Param]:
    """Returns the parameters of a called function that the arguments of the call do not fill.

    Args:
        call: the call of the function.
        target: the parameters of the function.
    """
    rest = list(target)
    for argument in call.args:
        # It is not known how many parameters `*values` fills.
        if isinstance(argument, ast.Starred):
            break
        if rest and rest[0].is_positional:
            del rest[0]
    given = {keyword.arg for keyword in call.keywords}
    return [p for p in rest if p.name not in given or not p.is_named]


def all_optional(params: Sequence[Param]) -> list[Param]:
    """Returns the same parameters, with a default for each one that has none."""
    return [p if p.default is not None or p.kind in (STAR, STARS) else replace(p, default=OPTIONAL) for p in params]


_TAKING = ("pop", "get", "setdefault")


@dataclass
class KeywordForwarding:
    """How a function uses the keywords in its `**kwargs`.

    Args:
        closed: whether each keyword is either refused, read by name, or passed to one of `calls`.
        names: the keywords that the function reads by name, each with the expression of its default.
        calls: the calls that get `**kwargs`.
        sure: whether exactly one call gets `**kwargs`, and that call is always reached.
        filled: whether the function adds or changes keywords before it passes them on.
    """

    closed: bool = False
    names: dict[str, ast.expr | None] = field(default_factory=dict)
    calls: list[ast.Call] = field(default_factory=list)
    sure: bool = False
    filled: bool = False


def keyword_forwarding(node: ast.FunctionDef | ast.AsyncFunctionDef, stars: str) -> KeywordForwarding:
    """Returns how a function uses the keywords in its `**kwargs`.

    Args:
        node: the function in the syntax tree.
        stars: the name of its `**kwargs` parameter.
    """
    forwarding = KeywordForwarding()
    known: set[int] = set()
    for inner in walk_body(node.body):
        if isinstance(inner, ast.Call):
            _read_call(inner, stars, forwarding, known)
        elif isinstance(inner, ast.Subscript) and _is(inner.value, stars):
            if not isinstance(inner.slice, ast.Constant) or not isinstance(inner.slice.value, str):
                return KeywordForwarding()
            known.add(id(inner.value))
            forwarding.names.setdefault(inner.slice.value, None)
            forwarding.filled |= not isinstance(inner.ctx, ast.Load)
        elif isinstance(inner, ast.Compare) and _is(inner.comparators[-1], stars) and len(inner.ops) == 1:
            if isinstance(inner.left, ast.Constant) and isinstance(inner.ops[0], ast.In | ast.NotIn):
                known.add(id(inner.comparators[-1]))
                forwarding.names.setdefault(str(inner.left.value), None)
    refused = _refuses_rest(node, stars, known)
    # Any other use of the keywords may pass them anywhere.
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id == stars and id(inner) not in known:
            return KeywordForwarding()
    reached = [_is_always_reached(node.body, call) for call in forwarding.calls]
    forwarding.closed = refused or any(reached)
    forwarding.sure = reached == [True]
    return forwarding


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _read_call(call: ast.Call, stars: str, forwarding: KeywordForwarding, known: set[int]) -> None:
    for keyword in call.keywords:
        if keyword.arg is None and _is(keyword.value, stars):
            known.add(id(keyword.value))
            forwarding.calls.append(call)
    function = call.func
    if isinstance(function, ast.Attribute) and _is(function.value, stars):
        first = call.args[0] if call.args else None
        if function.attr in _TAKING and isinstance(first, ast.Constant) and isinstance(first.value, str):
            known.add(id(function.value))
            default = call.args[1] if len(call.args) > 1 else None
            forwarding.names[first.value] = default
            forwarding.filled |= function.attr == "setdefault"


def _refuses_rest(node: ast.FunctionDef | ast.AsyncFunctionDef, stars: str, known: set[int]) -> bool:
    """Returns whether a function raises an exception if unknown keywords remain (`if kwargs: raise ...`)."""
    refuses = False
    for statement in node.body:
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise):
            test = statement.test
            if isinstance(test, ast.Call) and _is(test.func, "len") and len(test.args) == 1:
                test = test.args[0]
            if _is(test, stars):
                known.update(id(n) for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == stars)
                refuses = True
        # A call that returns before the test accepts any keyword.
        if _may_return(statement) and not refuses:
            return False
    return refuses


def _may_return(statement: ast.stmt) -> bool:
    return any(isinstance(n, ast.Return | ast.Yield | ast.YieldFrom) for n in walk_body([statement]))


def _is_always_reached(body: list[ast.stmt], call: ast.Call) -> bool:
    """Returns whether a call is certainly made whenever the body runs to its end without an exception."""
    for statement in body:
        if isinstance(statement, ast.With | ast.AsyncWith):
            if _is_always_reached(statement.body, call) and not _may_suppress(statement):
                return True
        elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
            if statement.value is not None and _is_unconditional(statement.value, call):
                return True
        if _may_return(statement):
            return False
    return False


def _may_suppress(statement: ast.With | ast.AsyncWith) -> bool:
    """Returns whether a `with` statement may suppress an exception of its body, as `contextlib.suppress` does."""
    return any("suppress" in ast.unparse(item.context_expr) for item in statement.items)


def _is_unconditional(expression: ast.expr, call: ast.Call) -> bool:
    """Returns whether evaluating an expression always makes a call: no condition or comprehension contains the call."""
    if expression is call:
        return True
    if isinstance(expression, ast.IfExp | ast.BoolOp | ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.DictComp):
        return False
    return any(
        _is_unconditional(inner, call) for inner in ast.iter_child_nodes(expression) if isinstance(inner, ast.expr)
    )


def is_local(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Returns whether a name is a local variable of a function.

    Args:
        node: the function in the syntax tree; the set of its local names is cached on the node.
        name: the name of the variable.
    """
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
