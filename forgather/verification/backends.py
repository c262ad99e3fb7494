"""The two worlds that are compared: a graph that is constructed, and a module that is run, both on stand-ins.

Takes a log, gives a resolver, or the globals of a module. Keeps true: a name means the same stand-in in both worlds;
what is real in one (a few pure builtins, `functools.partial`, short names) is real in the other.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.machinery
import importlib.util
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from forgather.config.builtin_names import SHORT
from forgather.config.resolve import Resolver
from forgather.verification.recording import Log, Recorded, StandIn

# Builtins that compute and do nothing else.
PURE = frozenset(
    ("abs", "bool", "callable", "dict", "float", "frozenset", "getattr", "int", "isinstance", "len", "list", "max",
     "min", "object", "round", "set", "str", "tuple", "NameError", "KeyError", "TypeError", "ValueError")
)  # fmt: skip
# What generated code may reach of the modules that it imports for itself: values and paths, nothing that acts.
_PATHS = SimpleNamespace(
    **{
        word: getattr(os.path, word)
        for word in ("abspath", "dirname", "expanduser", "join", "normpath", "realpath", "split")
    }
)
_HELPERS: Mapping[str, Any] = {
    "hashlib": SimpleNamespace(sha256=hashlib.sha256),
    "math": SimpleNamespace(inf=math.inf, nan=math.nan),
}
_REAL: Mapping[str, Any] = {f"functools.{word}": getattr(functools, word) for word in ("cache", "partial", "wraps")}


class Barred(Exception):
    """Something is asked for that would lead from a stand-in to what it is made of, and from there anywhere."""


def is_inner(name: str) -> bool:
    """Returns whether a name is one of Python's own, as `__class__`."""
    return name.startswith("__") and name.endswith("__")


# What makes a value of the size that an argument says, or grows with every call.
_GROWING = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "translate", "format", "format_map",
     "to_bytes", "extend")
)  # fmt: skip
_MAX_DIGITS = 1000


def grows(constructor: str) -> bool:
    """Returns whether a constructor is a method of a builtin that can make a value of any size."""
    source, _, symbol = constructor.rpartition(":")
    first, _, rest = symbol.partition(".")
    return source in ("", "builtins") and first in PURE and not _GROWING.isdisjoint(rest.split("."))


def _rounded(number: Any, digits: Any = None) -> Any:
    """What `round` is in both worlds."""
    if isinstance(digits, int) and abs(digits) > _MAX_DIGITS:
        raise Barred(f"round(..., {digits}) computes a number of that many digits")
    return round(number, digits)


def _guarded(thing: Any, name: str, *default: Any) -> Any:
    """What `getattr` is in both worlds."""
    if isinstance(name, str) and (is_inner(name) or (name[:1] == "_" and not isinstance(thing, (Recorded, StandIn)))):
        raise Barred(f"getattr(..., {name!r}) leads out of the stand-ins")
    if name in _GROWING and not isinstance(thing, (Recorded, StandIn)):
        raise Barred(f"{name!r} of {type(thing).__name__} can make a value of any size")
    return getattr(thing, name, *default)


class RecordingResolver(Resolver):
    """Finds stand-ins for what constructors name.

    Args:
        project_dir: folder that file imports are relative to.
        log: where calls go.
    """

    def __init__(self, project_dir: str, log: Log) -> None:
        super().__init__(project_dir)
        self._log = log

    def resolve(self, constructor: str, searchpath: Sequence[str] = ()) -> Any:
        """Returns a stand-in, or what is real in both worlds."""
        source, colon, symbol = constructor.rpartition(":")
        if not colon and constructor in SHORT:
            return SHORT[constructor]
        if not colon or source == "builtins":
            return _builtin(self._log, symbol)
        folders = [self._absolute(folder) for folder in searchpath]
        if source.endswith(".py") or "/" in source:
            folder, file = os.path.split(self._absolute(source))
            return StandIn(self._log, f"{_places([folder, *folders])}.{file.removesuffix('.py')}.{symbol}")
        if source.startswith("."):
            return StandIn(self._log, f"{_places(folders)}{source}.{symbol}")
        dotted = f"{source}.{symbol}"
        return _REAL[dotted] if dotted in _REAL else StandIn(self._log, dotted)


def _places(folders: Iterable[str]) -> str:
    return repr([os.path.realpath(folder) for folder in dict.fromkeys(folders)])


def _builtin(log: Log, symbol: str) -> Any:
    first, *rest = symbol.split(".")
    found: Any
    if first in ("getattr", "round"):
        found = _guarded if first == "getattr" else _rounded
    else:
        found = getattr(builtins, first) if first in PURE else StandIn(log, f"builtins.{first}")
    return functools.reduce(_guarded, rest, found)


def module_globals(log: Log, file: str) -> dict[str, Any]:
    """Returns the globals for a generated module: imports and builtins that are stand-ins.

    Args:
        log: where calls go.
        file: what the module takes itself to be.
    """
    packages: dict[str, Any] = {}

    def import_module(name: str) -> Any:
        package, _, rest = name.partition(".")
        if package in packages:
            return StandIn(log, f"{list(packages[package].__path__)!r}.{rest}")
        return StandIn(log, name)

    parts = SimpleNamespace(
        import_module=import_module,
        machinery=SimpleNamespace(ModuleSpec=importlib.machinery.ModuleSpec),
        util=SimpleNamespace(module_from_spec=importlib.util.module_from_spec),
    )
    # Asked for now: whoever runs this may have put another mapping in the place of `os.environ`.
    system = SimpleNamespace(environ=os.environ, path=_PATHS, PathLike=os.PathLike)
    helpers = {**_HELPERS, "os": system, "sys": SimpleNamespace(modules=packages, path=[]), "importlib": parts}

    def import_hook(name: str, _: Any = None, __: Any = None, names: Sequence[str] = (), *___: Any) -> Any:
        # Generated code imports modules for itself whole, and what the config names by `from`.
        if not names:
            return helpers[name.partition(".")[0]]
        return StandIn(log, name, _REAL)

    words = [word for word in dir(builtins) if not word.startswith("_")]
    inner = {word: _builtin(log, word) for word in words} | {"__import__": import_hook}
    return {"__name__": "generated", "__file__": file, "__builtins__": inner}
