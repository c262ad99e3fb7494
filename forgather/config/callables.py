"""What a config may call without anybody's word.

Takes names ("module:symbol") and objects, gives a `Verdict` by the list in `callables.json`. Keeps true: an entry
stands for itself and all below it, and the longest one that fits decides; what is in no entry is not allowed; an
object is judged by where it was defined, whatever name led to it. Nothing is imported.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    GenericAlias,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

_DESCRIPTORS = (MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType)
_Cached = type(functools.cache(len))
# Python's own flag of types that came after the interpreter's.
_MADE_LATER = 1 << 9
_NAMES = {"os.path": os.path.__name__}
_NOT_LISTED = "it is not among the harmless parts of the standard library"
_INNER = "it leads into Python's own names"
_PRIVATE = "it is a private part of the package"


class Standing(StrEnum):
    """Who decides about a constructor: the list allows or denies it, or it is of a package that only a user knows."""

    ALLOWED = "allowed"
    DENIED = "denied"
    UNLISTED = "unlisted"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the list says.

    Args:
        standing: who decides.
        name: what was judged, as "module:symbol".
        why: why it is denied.
    """

    standing: Standing
    name: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Required:
    """A value that an argument must have where it is given."""

    name: str
    value: Any
    why: str


@functools.cache
def _table() -> tuple[dict[str, str | None], dict[str, list[Required]]]:
    """Returns why each entry is denied (None: it is allowed), and what arguments must be."""
    with open(os.path.join(os.path.dirname(__file__), "callables.json"), encoding="utf-8") as stream:
        data = json.load(stream)
    entries: dict[str, str | None] = {name: None for names in data["allowed"].values() for name in names}
    entries |= {name: why for why, names in data["denied"].items() for name in names}
    arguments: dict[str, list[Required]] = {}
    for rule in data["arguments"]:
        for name in rule["of"]:
            arguments.setdefault(name, []).append(Required(rule["name"], rule["must_be"], rule["why"]))
    return entries, arguments


def required_of(found: Any) -> list[Required]:
    """Returns what the arguments of an object must be where they are given."""
    arguments = _table()[1]
    return [rule for name in names_of(found) for rule in arguments.get(name, ())]


def judge_name(module: str, symbol: str) -> Verdict:
    """Returns what the list says about a symbol of a module, by its name alone."""
    module = _NAMES.get(module, module)
    name = f"{module}:{symbol}"
    words = [*module.split("."), *symbol.split(".")]
    if any(_is_inner(word) for word in words):
        return Verdict(Standing.DENIED, name, _INNER)
    verdict = _listed(module, symbol)
    if verdict.standing is Standing.ALLOWED and any(word.startswith("_") for word in words[1:]):
        return Verdict(Standing.DENIED, name, _PRIVATE)
    return verdict


def judge_module(module: str) -> Verdict:
    """Returns what the list says about importing a module: one that holds anything allowed may be imported."""
    module = _NAMES.get(module, module)
    if any(_is_inner(word) for word in module.split(".")):
        return Verdict(Standing.DENIED, module, _INNER)
    inside = f"{module}:"
    if any(name.startswith(inside) and why is None for name, why in _table()[0].items()):
        return Verdict(Standing.ALLOWED, module)
    return _listed(module, "")


def judge_found(found: Any) -> list[Verdict]:
    """Returns what the list says about an object, by each name of what would be called."""
    return [_listed(*name.split(":", 1)) for name in names_of(found)]


def _listed(module: str, symbol: str) -> Verdict:
    entries, name = _table()[0], f"{module}:{symbol}" if symbol else module
    for shorter in _shorter(module, symbol):
        if shorter in entries:
            why = entries[shorter]
            return Verdict(Standing.ALLOWED if why is None else Standing.DENIED, name, why or "")
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root == "forgather":
        return Verdict(Standing.DENIED, name, _NOT_LISTED if root != "forgather" else _PRIVATE)
    return Verdict(Standing.UNLISTED, name)


def _shorter(module: str, symbol: str) -> Iterator[str]:
    while symbol:
        yield f"{module}:{symbol}"
        symbol = symbol.rpartition(".")[0]
    while module:
        yield module
        module = module.rpartition(".")[0]


def _is_inner(word: str) -> bool:
    return word.startswith("__") and word.endswith("__")


def names_of(found: Any) -> list[str]:
    """Returns where everything was defined that calling an object would call, as "module:symbol".

    Example:
        >>> import logging
        >>> names_of(logging.os.getcwd)
        ['posix:getcwd']
    """
    if isinstance(found, functools.partial | functools.partialmethod):
        return names_of(found.func)
    if isinstance(found, staticmethod | classmethod):
        return names_of(found.__func__)
    if isinstance(found, type):
        return [f"{found.__module__}:{found.__qualname__}"] if _has_home(found) else []
    if isinstance(found, MethodType):
        return [*names_of(found.__func__), *names_of(_type_of(found.__self__))]
    if isinstance(found, BuiltinFunctionType):
        return _names_of_builtin(found)
    if isinstance(found, _DESCRIPTORS):
        owner = found.__objclass__
        return [f"{owner.__module__}:{owner.__qualname__}.{found.__name__}"] if _has_home(owner) else []
    if isinstance(found, GenericAlias):
        return names_of(found.__origin__)
    if type(found) is _Cached:
        return names_of(found.__wrapped__)
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str):
        return [f"{module}:{name}"]
    return names_of(type(found))


def _has_home(kind: type) -> bool:
    """Returns whether a type says where it was defined: those of some extensions say `builtins`, and are not there."""
    return kind.__module__ != "builtins" or not kind.__flags__ & _MADE_LATER or hasattr(builtins, kind.__name__)


def _type_of(owner: Any) -> type:
    return owner if isinstance(owner, type) else type(owner)


def _names_of_builtin(found: Any) -> list[str]:
    owner = found.__self__
    if isinstance(owner, ModuleType):
        return [f"{owner.__name__}:{found.__name__}"]
    if owner is None:
        # Static methods of extensions do not say where they are from: the written name alone is judged.
        return [f"{found.__module__}:{found.__qualname__}"] if found.__module__ else []
    kind = _type_of(owner)
    return [f"{kind.__module__}:{kind.__qualname__}.{found.__name__}"] if _has_home(kind) else []
