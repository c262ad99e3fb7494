"""The list of callables that every config may call, and of callables that no config may call.

The input is a name ("module:symbol") or an object; the output is a `Verdict` by the list in `callables.json`.
Invariants: an entry applies to the named module or symbol and to everything inside it, and the longest matching entry
decides; the named parts of a listed package are allowed, and the user decides about the rest of the package (`fgcli
trust`); the verdict on an object depends on the module that defines it, not on the name in the config. Nothing is
imported.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from typing import Any, NamedTuple

_DESCRIPTORS = (MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType)
_Cached = type(functools.cache(len))
# CPython's Py_TPFLAGS_HEAPTYPE: the type was created at run time, and is not one of the interpreter's static types.
_MADE_LATER = 1 << 9
_NAMES = {"os.path": os.path.__name__}
_NOT_LISTED = "it is not among the harmless parts of the standard library"
_INNER = "it reaches Python's internal names"
_PRIVATE = "it is a private part of the package"


class Standing(StrEnum):
    """The decision of the list about a constructor; the user decides about a constructor that is not listed."""

    ALLOWED = "allowed"
    DENIED = "denied"
    UNLISTED = "unlisted"


class Verdict(NamedTuple):
    """The answer of the list of callables about one name.

    Args:
        standing: the decision.
        name: the name that was looked up, as "module:symbol".
        why: the reason why the name is denied; "" if it is not denied.
    """

    standing: Standing
    name: str
    why: str = ""


class Required(NamedTuple):
    """A value that an argument must have if it is given.

    Args:
        name: the name of the argument.
        value: the required value; `PLAIN` stands for any number, boolean or None, and for a mapping with only these
            values.
        why: the reason why other values are refused.
        deep: whether the rule also applies to keys of mappings inside the arguments, and to the name with a prefix
            such as `encoder_`.
    """

    name: str
    value: Any
    why: str
    deep: bool = False

    def is_about(self, name: Any) -> bool:
        """Returns whether the rule applies to an argument of that name."""
        return name == self.name or (self.deep and isinstance(name, str) and name.endswith(f"_{self.name}"))

    def allows(self, given: Any) -> bool:
        """Returns whether the rule accepts a value of the argument."""
        if self.value == PLAIN:
            values = given.values() if isinstance(given, Mapping) else (given,)
            return all(value is None or isinstance(value, (bool, int, float)) for value in values)
        return given is self.value or (isinstance(self.value, str) and given == self.value)


PLAIN = "plain"


class _Package:
    """The parts of a package that every config may call.

    Args:
        parts: the names of modules and symbols. A module includes the functions and classes in it and in its submodules
            (with `:**`, their methods too). `*` matches any text without a dot, `**` any text.
        methods: the names of methods that may be called on the classes of these parts.
    """

    def __init__(self, parts: Sequence[str], methods: Sequence[str]) -> None:
        self._parts, self._methods = parts, methods
        # `_around`: modules without `*` and their parents; `_whole`: those that include the modules below them.
        self._around, self._whole = set[str](), set[str]()
        self._patterns: list[tuple[str, list[str]]] = []
        for part in parts:
            home, colon, _ = part.partition(":")
            words = home.split(".")
            if "*" in home:
                self._patterns.append((part, words))
                continue
            self._around.update(".".join(words[: number + 1]) for number in range(len(words)))
            if not colon:
                self._whole.add(home)

    # Compiled on first use only: static commands decide most names by the module alone.
    @functools.cached_property
    def _part(self) -> re.Pattern[str]:
        return re.compile("|".join(map(_part, self._parts)))

    @functools.cached_property
    def _method(self) -> re.Pattern[str]:
        return re.compile("|".join(map(_pattern, self._methods)))

    def has(self, module: str, symbol: str) -> bool:
        """Returns whether a symbol belongs to these parts; a method does so only if `methods` or a part names it."""
        owner, _, method = symbol.rpartition(".")
        if self._part.fullmatch(f"{module}:{symbol}") is not None:
            return True
        is_named = owner != "" and self._method.fullmatch(method) is not None
        return is_named and self._part.fullmatch(f"{module}:{owner}") is not None

    def may_hold(self, module: str) -> bool:
        """Returns whether a module or one of its submodules may contain one of these parts."""
        if module in self._around or any(shorter in self._whole for shorter in _shorter(module, "")):
            return True
        words = module.split(".")
        return any(
            all(map(_fits, words, home)) and (len(words) <= len(home) or ":" not in part)
            for part, home in self._patterns
        )


class _Table(NamedTuple):
    """The contents of the list: why each entry is denied (None if allowed), the packages, the rules for arguments.

    `commands` has the names of arguments that are commands to run, by what takes them.
    """

    entries: dict[str, str | None]
    packages: dict[str, _Package]
    arguments: dict[str, list[Required]]
    commands: dict[str, tuple[str, ...]]


@functools.cache
def _table() -> _Table:
    with open(os.path.join(os.path.dirname(__file__), "callables.json"), encoding="utf-8") as stream:
        data = json.load(stream)
    entries: dict[str, str | None] = {name: None for names in data["allowed"].values() for name in names}
    entries |= {name: why for why, names in data["denied"].items() for name in names}
    packages = {name: _Package(facts["parts"], facts["methods"]) for name, facts in data["parts"].items()}
    arguments: dict[str, list[Required]] = {}
    for rule in data["arguments"]:
        required = Required(rule["name"], rule["must_be"], rule["why"], rule.get("deep", False))
        for name in rule["of"]:
            arguments.setdefault(name, []).append(required)
    commands: dict[str, tuple[str, ...]] = {}
    for rule in data["commands"]:
        for name in rule["of"]:
            commands[name] = (*commands.get(name, ()), rule["name"])
    return _Table(entries, packages, arguments, commands)


def _part(entry: str) -> str:
    module, colon, symbol = entry.partition(":")
    if colon and symbol != "**":
        return f"{_pattern(module)}:{_pattern(symbol)}"
    return rf"{_pattern(module)}(\.[^:]*)?:" + (".+" if colon else "[^.]+")


def _pattern(entry: str) -> str:
    words = {"**": "[^:]+", "*": "[^.:]*"}
    return "".join(words.get(word, re.escape(word)) for word in re.split(r"(\*\*|\*)", entry))


def _fits(word: str, known: str) -> bool:
    return word == known or ("*" in known and re.fullmatch(_pattern(known), word) is not None)


def required_of(found: Any) -> list[Required]:
    """Returns the rules for the arguments of a call of an object."""
    arguments = _table().arguments
    rules = [
        rule for name in names_of(found) for part in _shorter(*name.split(":", 1)) for rule in arguments.get(part, ())
    ]
    return list(dict.fromkeys(rules))


def commands_of(module: str, symbol: str) -> tuple[str, ...]:
    """Returns the names of the arguments of a callable that are commands to run, which the user has to trust."""
    commands = _table().commands
    return tuple(name for part in _shorter(module, symbol) for name in commands.get(part, ()))


def judge_name(module: str, symbol: str) -> Verdict:
    """Returns the verdict on a symbol of a module, by its name alone.

    A name at the top of a package, or in a module with allowed parts, may have been imported from an allowed part. Such
    a name is allowed, and `judge_found` decides about the object.
    """
    module = _NAMES.get(module, module)
    name = f"{module}:{symbol}"
    # `os:path.__builtins__.eval` reaches through modules by attributes, so every part of the name is checked.
    words = [*module.split("."), *symbol.split(".")]
    # Names such as `__globals__` or `__class__` lead from any object to all of Python.
    if any(_is_inner(word) for word in words):
        return Verdict(Standing.DENIED, name, _INNER)
    verdict = _listed(module, symbol, _may_hold)
    if verdict.standing is Standing.ALLOWED and any(word.startswith("_") for word in words[1:]):
        return Verdict(Standing.DENIED, name, _PRIVATE)
    return verdict


def judge_nameless(module: str, symbol: str) -> Verdict:
    """Returns the verdict on an object whose defining module is not known, by the name in the config."""
    return _listed(_NAMES.get(module, module), symbol)


def is_in_parts(module: str) -> bool:
    """Returns whether a module belongs to a package of which every config may call some parts."""
    return module.partition(".")[0] in _table().packages


def judge_module(module: str) -> Verdict:
    """Returns the verdict on importing a module; a module that contains an allowed part may be imported."""
    module = _NAMES.get(module, module)
    if any(_is_inner(word) for word in module.split(".")):
        return Verdict(Standing.DENIED, module, _INNER)
    inside = f"{module}:"
    if any(name.startswith(inside) and why is None for name, why in _table().entries.items()):
        return Verdict(Standing.ALLOWED, module)
    return _listed(module, "", _may_hold)


def judge_found(found: Any) -> list[Verdict]:
    """Returns a verdict for each function that is called if the object is called."""
    return [_listed(module, symbol) for module, _, symbol in (name.partition(":") for name in names_of(found))]


def _may_hold(package: _Package, module: str, symbol: str) -> bool:
    return package.may_hold(module)


def _listed(module: str, symbol: str, is_part: Callable[[_Package, str, str], bool] = _Package.has) -> Verdict:
    entries, name = _table().entries, f"{module}:{symbol}" if symbol else module
    for shorter in _shorter(module, symbol):
        # From the longest name to the shortest: the most specific entry decides.
        if shorter in entries:
            why = entries[shorter]
            return Verdict(Standing.ALLOWED if why is None else Standing.DENIED, name, why or "")
    root = module.partition(".")[0]
    package = _table().packages.get(root)
    if package is not None:
        return Verdict(Standing.ALLOWED if is_part(package, module, symbol) else Standing.UNLISTED, name)
    # The standard library is denied unless listed: most of it can read files or run programs.
    if root in sys.stdlib_module_names:
        return Verdict(Standing.DENIED, name, _NOT_LISTED)
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
    """Returns the module and the name of each function that is called if an object is called, as "module:symbol".

    Example:
        >>> import logging
        >>> names_of(logging.os.getcwd)
        ['posix:getcwd']
    """
    # A wrapper is as dangerous as the function that it calls.
    if isinstance(found, functools.partial | functools.partialmethod):
        return names_of(found.func)
    if isinstance(found, staticmethod | classmethod):
        return names_of(found.__func__)
    if isinstance(found, type):
        return [f"{found.__module__}:{found.__qualname__}"] if _has_home(found) else []
    if isinstance(found, MethodType):
        owner = found.__self__
        # A class method runs with its class, so the class must be allowed as well.
        return [*names_of(found.__func__), *(names_of(owner) if isinstance(owner, type) else ())]
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
    # An object with __call__ runs a method of its class.
    return names_of(type(found))


def _has_home(kind: type) -> bool:
    """Returns whether a type is in the module that it names; types of some extensions wrongly name `builtins`."""
    return kind.__module__ != "builtins" or not kind.__flags__ & _MADE_LATER or hasattr(builtins, kind.__name__)


def _names_of_builtin(found: Any) -> list[str]:
    owner = found.__self__
    if isinstance(owner, ModuleType):
        return [f"{owner.__name__}:{found.__name__}"]
    if owner is None:
        # A static method of an extension has no module: only the name in the config can be judged.
        return [f"{found.__module__}:{found.__qualname__}"] if found.__module__ else []
    kind = owner if isinstance(owner, type) else type(owner)
    return [f"{kind.__module__}:{kind.__qualname__}.{found.__name__}"] if _has_home(kind) else []
