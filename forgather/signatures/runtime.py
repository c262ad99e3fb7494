"""Signatures of what is loaded already: Python's builtins and the short names of the language.

Takes a name, gives a `Callee` or `Unknown`. Keeps true: only what this process holds is looked at.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from typing import Any

from forgather.config.builtin_names import SHORT
from forgather.errors import ResolveError, nearest
from forgather.signatures.values import UNKNOWN, Annotation, Callee, Default, Unknown

_INSTANCES = ("bool", "int", "float", "str", "bytes", "list", "tuple", "dict")


def known_callee(name: str) -> Callee | Unknown:
    """Returns how a builtin or short name may be called.

    Raises:
        ResolveError: FG324, there is none of that name.
    """
    found: Any = SHORT.get(name, getattr(builtins, name, None))
    if found is None:
        known = [*SHORT, *(word for word in dir(builtins) if not word.startswith("_"))]
        hint = nearest(name, known) or "write module:symbol"
        raise ResolveError(f"no builtin named {name!r}", code="FG324", hint=hint)
    is_class = isinstance(found, type)
    if not callable(found):
        return Unknown(name, "it is no class or function")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return Unknown(name, "Python does not tell how it is called")
    return Callee(
        name=name,
        signatures=(
            signature.replace(
                parameters=[_plain(p) for p in signature.parameters.values()], return_annotation=inspect.Signature.empty
            ),
        ),
        kind="class" if is_class else "function",
        gives=_gives(name, found),
        callable_instance=_has_call(found) if is_class else None,
    )


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if default is not inspect.Parameter.empty:
        is_literal = default is None or type(default) in (bool, int, float, str, bytes)
        default = Default(repr(default), default if is_literal else UNKNOWN)
    return parameter.replace(default=default, annotation=inspect.Parameter.empty)


def _gives(name: str, found: Callable[..., Any]) -> Annotation:
    return Annotation(name, frozenset((name,))) if isinstance(found, type) and name in _INSTANCES else Annotation("")


def _has_call(cls: type) -> bool:
    return any("__call__" in vars(base) for base in cls.__mro__)
