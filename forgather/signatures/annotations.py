"""The kinds of values that a type annotation accepts.

The input is an annotation in source code; the output is a set of words for the kinds of values that the annotation
accepts ("int", "none", "instance:module:Class"). An annotation that cannot be interpreted accepts any value, and so
does a union with such a member.
"""

from __future__ import annotations

import ast

from forgather.signatures import symbols
from forgather.signatures.name_resolution import Names, Scope
from forgather.signatures.results import Annotation
from forgather.signatures.symbols import Class, Doubt, Ref, Tuples, Value

_SEQUENCE = frozenset(("list", "tuple", "str", "bytes", "iterable"))
_ITERABLE = _SEQUENCE | {"dict"}
_WORDS: dict[str, frozenset[str]] = {
    "builtins.int": frozenset(("int", "bool")),
    "builtins.float": frozenset(("float", "int", "bool")),
    "builtins.bool": frozenset(("bool",)),
    "builtins.str": frozenset(("str",)),
    "builtins.bytes": frozenset(("bytes",)),
    "builtins.list": frozenset(("list",)),
    # YAML has no tuples: what is annotated as one is written as a list.
    "builtins.tuple": frozenset(("tuple", "list")),
    "builtins.dict": frozenset(("dict",)),
    "builtins.type": frozenset(("type",)),
    "typing.List": frozenset(("list",)),
    "typing.Tuple": frozenset(("tuple", "list")),
    "typing.Dict": frozenset(("dict",)),
    "typing.Type": frozenset(("type",)),
    "typing.Text": frozenset(("str",)),
    **{f"{m}.{n}": _SEQUENCE for m in ("typing", "collections.abc") for n in ("Sequence", "MutableSequence")},
    **{f"{m}.{n}": _ITERABLE for m in ("typing", "collections.abc") for n in ("Iterable", "Collection", "Container")},
    **{f"{m}.{n}": frozenset(("dict",)) for m in ("typing", "collections.abc") for n in ("Mapping", "MutableMapping")},
    **{f"{m}.Callable": frozenset(("callable", "type")) for m in ("typing", "collections.abc")},
}
# These only wrap a type: `Annotated[int, ...]` accepts what `int` accepts.
_THROUGH = frozenset(
    f"{module}.{name}"
    for module in ("typing", "typing_extensions")
    for name in ("Annotated", "Required", "NotRequired", "Final", "ReadOnly")
)
_LITERALS = {bool: "bool", int: "int", str: "str", bytes: "bytes", type(None): "none"}
_VALUE_BASES = {
    "builtins.str": ("str",),
    "builtins.int": ("int", "bool"),
    "builtins.float": ("float", "int", "bool"),
    "builtins.dict": ("dict",),
    "builtins.list": ("list",),
    "builtins.tuple": ("tuple", "list"),
    "typing.NamedTuple": ("tuple", "list"),
}
# A type alias may refer to itself, so the recursion needs a bound.
_DEPTH = 8

Words = frozenset[str] | None


def describe(names: Names, expression: ast.expr | None, scope: Scope) -> Annotation | None:
    """Returns an annotation as text, with the kinds of values that it accepts; None if there is no annotation.

    Args:
        names: the resolver of the names in the annotation.
        expression: the expression of the annotation; None if the parameter has no annotation.
        scope: the scope in which the names of the expression are looked up.
    """
    if expression is None:
        return None
    text = text_of(expression)
    # Many names in annotations are imported only under `TYPE_CHECKING`.
    for_types = Scope(names, scope.module, True, scope.cls)
    key = ("annotation", scope.module, text, scope.cls and scope.cls.node)
    words = names.world.memoized(key, lambda: _accepted(names, expression, for_types, 0), None)
    return Annotation(text, words)


def text_of(expression: ast.expr) -> str:
    """Returns the source text of an annotation."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Constant):
        return expression.value if isinstance(expression.value, str) else repr(expression.value)
    return ast.unparse(expression)


def _accepted(names: Names, expression: ast.expr, scope: Scope, depth: int) -> Words:
    if depth > _DEPTH:
        return None
    if isinstance(expression, ast.Constant):
        if expression.value is None:
            return frozenset(("none",))
        # A string is a forward reference.
        if isinstance(expression.value, str):
            try:
                inner = ast.parse(expression.value.strip(), "<annotation>", "eval").body
            except (SyntaxError, ValueError, RecursionError):
                return None
            return _accepted(names, inner, scope, depth + 1)
        return None
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.BitOr):
        return _union(names, [expression.left, expression.right], scope, depth)
    if isinstance(expression, ast.Subscript):
        return _subscripted(names, expression, scope, depth)
    if isinstance(expression, ast.Name | ast.Attribute):
        things = names.evaluate(expression, scope)
        if len(things) != 1:
            return None
        return _accepted_by_symbol(names, things[0], depth)
    return None


def _union(names: Names, parts: list[ast.expr], scope: Scope, depth: int) -> Words:
    words: frozenset[str] = frozenset()
    for part in parts:
        more = _accepted(names, part, scope, depth + 1)
        if more is None:
            return None
        words |= more
    return words


def _subscripted(names: Names, expression: ast.Subscript, scope: Scope, depth: int) -> Words:
    things = names.evaluate(expression.value, scope)
    if len(things) != 1 or not isinstance(things[0], Ref):
        return (
            _accepted_by_symbol(names, things[0], depth) if len(things) == 1 and isinstance(things[0], Class) else None
        )
    dotted = things[0].dotted.replace("typing_extensions.", "typing.")
    inside = expression.slice.elts if isinstance(expression.slice, ast.Tuple) else [expression.slice]
    if dotted == "typing.Union":
        return _union(names, inside, scope, depth)
    if dotted == "typing.Optional":
        return _union(names, [*inside, ast.Constant(None)], scope, depth)
    if dotted in _THROUGH or things[0].dotted in _THROUGH:
        return _accepted(names, inside[0], scope, depth + 1)
    if dotted == "typing.Literal":
        values = [item.value if isinstance(item, ast.Constant) else ... for item in inside]
        if all(type(value) in _LITERALS for value in values):
            return frozenset(_LITERALS[type(value)] for value in values)
        return None
    return _WORDS.get(dotted)


def _accepted_by_symbol(names: Names, thing: object, depth: int) -> Words:
    if isinstance(thing, Ref):
        return _WORDS.get(thing.dotted)
    if isinstance(thing, Value):
        return _accepted(names, thing.node, Scope(names, thing.module, True), depth + 1)
    if isinstance(thing, Tuples):
        return None
    if isinstance(thing, Class):
        return words_of_class(names, thing)
    return None


def words_of_class(names: Names, cls: Class) -> Words:
    """Returns the kinds of values that an annotation with a class accepts; None if it may accept any value.

    Args:
        names: the resolver of the names in the source of the class.
        cls: the class that is used as an annotation.
    """
    words = {f"instance:{cls.module.name}:{cls.name}"}
    for base in names.mro(cls):
        if isinstance(base, Doubt):
            return None
        if isinstance(base, Class):
            # A text may become a path, and a `__subclasshook__` can accept any class.
            if base.module.name == "pathlib" or names.own(base, "__subclasshook__"):
                return None
            continue
        # Instances of any class with the methods of a protocol match it.
        if base.dotted in ("typing.Protocol", "typing_extensions.Protocol"):
            return None
        # The value of a member is often accepted in place of the member.
        if base.dotted.startswith("enum."):
            return None
        if base.dotted in ("typing.TypedDict", "typing_extensions.TypedDict"):
            return frozenset(("dict",))
        if base.dotted in _VALUE_BASES:
            words.update(_VALUE_BASES[base.dotted])
        elif base.dotted not in symbols.EMPTY_BASES and not base.dotted.startswith("builtins."):
            return None
    return frozenset(words)
