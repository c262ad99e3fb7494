"""The reading itself: the signature of a constructor that nothing is cached about.

Takes a constructor and the modules that are being read, gives how it may be called. Keeps true: nothing is imported but
Python's builtins and the short names of the language, whose signatures only the interpreter knows.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from forgather.config.builtin_names import SHORT
from forgather.errors import ResolveError, nearest
from forgather.signatures.call_signatures import Calls, returned
from forgather.signatures.module_finder import Finder
from forgather.signatures.module_table import Use, World
from forgather.signatures.name_resolution import Names
from forgather.signatures.parameters import as_signature
from forgather.signatures.results import UNKNOWN, Annotation, Callee, Default, Lineage, Member, Unknown
from forgather.signatures.signature_errors import (
    refuse_file,
    refuse_folders,
    refuse_module,
    refuse_symbol,
    refuse_value,
)
from forgather.signatures.symbols import Class, Doubt, Function, Module, Partial, Thing, Tuples, Value, dotted_name
from forgather.source import Span

_LITERALS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)


class Engine:
    """Reads constructors of one project.

    Args:
        project_dir: folder that file imports are relative to; absolute.
        finder: finds modules.
        ours: further folders whose files are the user's.
    """

    def __init__(self, project_dir: str, finder: Finder, ours: Sequence[str] = ()) -> None:
        self.project_dir = project_dir
        self._world = World(finder, (project_dir, *ours))
        self._names = Names(self._world)
        self._calls = Calls(self._names)

    def read(self, constructor: str, folders: tuple[str, ...]) -> tuple[Callee | Unknown, set[Use]]:
        """Returns how a constructor may be called, and what that was read from.

        Args:
            constructor: with a colon.
            folders: the `submodule_searchpath` of the call; absolute.
        """
        return self._world.used(lambda: self._read(constructor, folders))

    def _read(self, constructor: str, folders: tuple[str, ...]) -> Callee | Unknown:
        module_name, _, symbol = constructor.rpartition(":")
        module = self._module(module_name, folders, symbol)
        if isinstance(module, Doubt):
            return Unknown(constructor, module.reason)
        things = self._walk(module, symbol, module_name)
        return self._callee(constructor, symbol.rpartition(".")[2], things)

    def lineage(self, constructor: str, folders: tuple[str, ...], package: str, names: Collection[str]) -> Lineage:
        """Returns what a class comes from, and which names it binds in front of the classes of a package.

        Args:
            constructor: with a colon.
            folders: the `submodule_searchpath` of the call; absolute.
            package: the package whose classes end the search.
            names: the names to look for.

        Raises:
            ResolveError: there surely is no such class.
        """
        module_name, _, symbol = constructor.rpartition(":")
        module = self._module(module_name, folders, symbol)
        things = [] if isinstance(module, Doubt) else self._walk(module, symbol, module_name)
        if len(things) != 1 or not isinstance(things[0], Class):
            return Lineage((), ())
        line = self._names.mro(things[0])
        found = [
            member
            for cls in line
            if isinstance(cls, Class) and not dotted_name(cls).startswith((f"{package}.", "transformers."))
            for member in _bound(cls, names)
        ]
        return Lineage(tuple(dotted_name(base) for base in line if not isinstance(base, Doubt)), tuple(found))

    def _module(self, name: str, folders: tuple[str, ...], symbol: str) -> Module | Doubt:
        if name.endswith(".py") or "/" in name:
            return self._file(name, folders)
        if name.startswith("."):
            if not folders:
                refuse_folders(name)
            module = self._world.in_folders(name[1:], real(folders))
            if module is None:
                refuse_module(name, folders, self._world.finder)
            return module
        module = self._world.module(name)
        if module is None:
            refuse_module(name, None, self._world.finder, symbol=symbol, project_dir=self.project_dir)
        return module

    def _file(self, name: str, folders: tuple[str, ...]) -> Module | Doubt:
        file = os.path.abspath(os.path.join(self.project_dir, os.path.expanduser(name)))
        folder, base = os.path.split(file)
        if not os.path.isfile(file) or not base.endswith(".py"):
            refuse_file(name, file, self.project_dir)
        module = self._world.in_folders(base.removesuffix(".py"), real((folder, *folders)))
        return module or Doubt(f"{name} has a name that cannot be imported")

    def _walk(self, module: Module, symbol: str, module_name: str) -> list[Thing]:
        """Returns what a dotted symbol can be, as `getattr` would find it."""
        things: list[Thing] = [module]
        walked = ""
        for part in symbol.split("."):
            found: list[Thing] = []
            for thing in things:
                found += self._names.attribute(thing, part)
            if not found:
                shown = f"{module_name}:{walked}" if walked else module_name
                refuse_symbol(shown, part, self._names, things)
            things = found
            walked = f"{walked}.{part}" if walked else part
        return things

    def _callee(self, constructor: str, name: str, things: list[Thing]) -> Callee | Unknown:
        for thing in things:
            if isinstance(thing, Doubt):
                return Unknown(constructor, thing.reason)
        if all(isinstance(thing, Value) and _is_literal(thing.node) for thing in things):
            refuse_value(constructor, [thing.node for thing in things if isinstance(thing, Value)])
        signatures = []
        for thing in things:
            ways = self._calls.ways(thing)
            if isinstance(ways, Doubt):
                return Unknown(constructor, ways.reason)
            try:
                signatures += [as_signature(params) for params in ways]
            except ValueError as error:
                return Unknown(constructor, f"its parameters do not fit together: {error}")
        first = things[0]
        same = len(things) == 1
        return Callee(
            name=name,
            signatures=tuple(signatures),
            kind="class" if isinstance(first, Class | Tuples) else "function",
            span=_span(first),
            gives=self._gives(first) if same else Annotation(""),
            callable_instance=self._is_callable(first) if same and isinstance(first, Class) else None,
            other_names=self._other_names(first) if same and isinstance(first, Class) else (),
        )

    def _gives(self, thing: Thing) -> Annotation:
        if isinstance(thing, Class):
            is_known = not any(isinstance(base, Doubt) for base in self._names.mro(thing))
            if is_known and not self._names.class_attribute(thing, "__new__"):
                return Annotation(thing.name, frozenset((f"instance:{thing.module.name}:{thing.name}",)))
            return Annotation(thing.name)
        if isinstance(thing, Function):
            return returned(self._names, thing)
        return Annotation("")

    def _is_callable(self, cls: Class) -> bool | None:
        found = self._names.class_attribute(cls, "__call__")
        return None if any(isinstance(thing, Doubt) for thing in found) else bool(found)

    def _other_names(self, cls: Class) -> tuple[str, ...]:
        found = self._names.class_attribute(cls, "attribute_map")
        nodes = [thing.node for thing in found if isinstance(thing, Value) and isinstance(thing.node, ast.Dict)]
        keys = [key for node in nodes for key in node.keys]
        return tuple(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _bound(cls: Class, names: Collection[str]) -> Iterator[Member]:
    file = cls.module.file
    for name in names:
        for statement in cls.body.binding(name):
            if name in _targets(statement):
                yield Member(cls.name, name, Span(file, statement.lineno) if file else None)
                break


def _targets(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return []
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def real(folders: Sequence[str]) -> tuple[str, ...]:
    """Returns folders with their links resolved, each once."""
    return tuple(os.path.realpath(folder) for folder in dict.fromkeys(folders))


def _is_literal(node: ast.expr) -> bool:
    # In a stub, `...` stands for any value.
    return isinstance(node, _LITERALS) and not (isinstance(node, ast.Constant) and node.value is ...)


def _span(thing: Thing) -> Span | None:
    while isinstance(thing, Partial):
        thing = thing.inner
    if isinstance(thing, Class | Function) and thing.module.file:
        return Span(thing.module.file, thing.node.lineno)
    return None


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
