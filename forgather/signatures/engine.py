"""Finds the definition of a constructor in source code, and reads its signature.

The input is the name of a constructor; the output is a `Callee` with the signature, or an `Unknown` with the reason why
the signature cannot be determined. A constructor that does not exist raises the same errors as `config/resolve.py`,
with similar names as a hint. Only Python builtins and the built-in functions of the config language (`items`,
`getitem`, ...) are inspected as live objects.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

from forgather.config.builtin_names import SHORT
from forgather.config.lint.file_suggestions import (
    missing_builtin,
    missing_file,
    missing_folders,
    missing_module,
    missing_relative_module,
    near_symbol,
)
from forgather.errors import ResolveError
from forgather.signatures.call_signatures import CallSignatures, return_annotation
from forgather.signatures.lazy_ast import Block, Parsed
from forgather.signatures.module_finder import FOLDER, Finder
from forgather.signatures.modules import ModuleTable, Use
from forgather.signatures.name_resolution import Names
from forgather.signatures.parameters import as_signature
from forgather.signatures.results import UNKNOWN, Annotation, Callee, Default, Lineage, Member, Unknown
from forgather.signatures.symbols import Class, Doubt, Function, Module, Partial, Thing, Tuples, Value, dotted_name
from forgather.source import Span

_LITERALS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)


class Engine:
    """Reads the signatures of the constructors of one project; nothing is cached on disk.

    Args:
        project_dir: the absolute path of the folder that file imports are relative to.
        finder: the finder of the files of modules.
        ours: further folders with the user's own files.
    """

    def __init__(self, project_dir: str, finder: Finder, ours: Sequence[str] = ()) -> None:
        self.project_dir = project_dir
        self._world = ModuleTable(finder, (project_dir, *ours))
        self._names = Names(self._world)
        self._calls = CallSignatures(self._names)

    def read(self, constructor: str, folders: tuple[str, ...]) -> tuple[Callee | Unknown, set[Use]]:
        """Returns the signature of a constructor, and the modules that were read to determine it.

        Args:
            constructor: the constructor as "module:symbol" or "file.py:symbol".
            folders: the absolute folders in the `submodule_searchpath` of the call.

        Raises:
            ResolveError: FG320, FG321, FG322, FG323 or FG325 if the constructor certainly does not exist, or cannot be
                called.
            SyntaxFault: FG326 if a file of the project is not valid Python.
        """
        return self._world.with_uses(lambda: self._read(constructor, folders))

    def _read(self, constructor: str, folders: tuple[str, ...]) -> Callee | Unknown:
        module_name, _, symbol = constructor.rpartition(":")
        module = self._module(module_name, folders, symbol)
        if isinstance(module, Doubt):
            return Unknown(constructor, module.reason)
        things = self._walk(module, symbol, module_name)
        return self._callee(constructor, symbol.rpartition(".")[2], things)

    def lineage(self, constructor: str, folders: tuple[str, ...], package: str, names: Collection[str]) -> Lineage:
        """Returns the base classes of a class, and the definitions of the given names in the class and its bases.

        Args:
            constructor: the class as "module:symbol" or "file.py:symbol".
            folders: the absolute folders in the `submodule_searchpath` of the call.
            package: a package whose classes are not searched for the names; classes of transformers are not searched
                either.
            names: the names of the methods and attributes to search for.

        Raises:
            ResolveError: FG320, FG321, FG322 or FG325 if the class certainly does not exist.
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
                raise missing_folders(name)
            module = self._world.in_folders(name[1:], real_paths(folders))
            if module is None:
                raise missing_relative_module(name, folders, self._world.finder.listing(folders))
            return module
        module = self._world.module(name)
        if module is None:
            refuse_module(name, self._world.finder, symbol=symbol, project_dir=self.project_dir)
        return module

    def _file(self, name: str, folders: tuple[str, ...]) -> Module | Doubt:
        file = os.path.abspath(os.path.join(self.project_dir, os.path.expanduser(name)))
        folder, base = os.path.split(file)
        if not os.path.isfile(file) or not base.endswith(".py"):
            raise missing_file(name, file, self.project_dir)
        module = self._world.in_folders(base.removesuffix(".py"), real_paths((folder, *folders)))
        return module or Doubt(f"{name} has a name that cannot be imported")

    def _walk(self, module: Module, symbol: str, module_name: str) -> list[Thing]:
        """Returns all possible meanings of a dotted symbol, looked up part by part as `getattr` does.

        Raises:
            ResolveError: FG321 if a part certainly does not exist.
        """
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
                return Unknown(constructor, f"its parameters contradict each other: {error}")
        first = things[0]
        same = len(things) == 1
        return Callee(
            name=name,
            signatures=tuple(signatures),
            kind="class" if isinstance(first, Class | Tuples) else "function",
            span=_span(first),
            gives=self._return_annotation(first) if same else Annotation(""),
            callable_instance=self._is_callable(first) if same and isinstance(first, Class) else None,
            other_names=self._other_names(first) if same and isinstance(first, Class) else (),
            defined_as=first.place if same and isinstance(first, Class | Function) else "",
        )

    def _return_annotation(self, thing: Thing) -> Annotation:
        if isinstance(thing, Class):
            # A `__new__` can return an object of another class.
            is_known = not any(isinstance(base, Doubt) for base in self._names.mro(thing))
            if is_known and not self._names.class_attribute(thing, "__new__"):
                return Annotation(thing.name, frozenset((f"instance:{thing.module.name}:{thing.name}",)))
            return Annotation(thing.name)
        if isinstance(thing, Function):
            return return_annotation(self._names, thing)
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


def real_paths(folders: Sequence[str]) -> tuple[str, ...]:
    """Returns folders with their symbolic links resolved, without duplicates."""
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


def builtin_callee(name: str) -> Callee | Unknown:
    """Returns the signature of a Python builtin or of a built-in function of the config language.

    Raises:
        ResolveError: FG324 if there is no builtin of that name.
    """
    found: Any = SHORT.get(name, getattr(builtins, name, None))
    if found is None:
        raise missing_builtin(name)
    is_class = isinstance(found, type)
    if not callable(found):
        return Unknown(name, "it is neither a class nor a function")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return Unknown(name, "Python does not know its signature")
    return Callee(
        name=name,
        signatures=(
            signature.replace(
                parameters=[_plain_parameter(p) for p in signature.parameters.values()],
                return_annotation=inspect.Signature.empty,
            ),
        ),
        kind="class" if is_class else "function",
        gives=_instance_annotation(name, found),
        callable_instance=_has_call(found) if is_class else None,
    )


def _plain_parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if default is not inspect.Parameter.empty:
        is_literal = default is None or type(default) in (bool, int, float, str, bytes)
        # Only plain values can be cached on disk.
        default = Default(repr(default), default if is_literal else UNKNOWN)
    return parameter.replace(default=default, annotation=inspect.Parameter.empty)


def _instance_annotation(name: str, found: Callable[..., Any]) -> Annotation:
    return Annotation(name, frozenset((name,))) if isinstance(found, type) and name in _INSTANCES else Annotation("")


def _has_call(cls: type) -> bool:
    return any("__call__" in vars(base) for base in cls.__mro__)


def refuse_module(name: str, finder: Finder, *, symbol: str, project_dir: str) -> NoReturn:
    """Raises the error for an absolute module that does not exist.

    Args:
        name: the dotted name of the module.
        finder: the finder that lists the existing modules for the hint.
        symbol: the symbol that the config imports from the module, for the hint.
        project_dir: the project's folder, for the hint.

    Raises:
        ResolveError: FG320, always.
    """
    parts = name.split(".")
    missing = next(".".join(parts[: i + 1]) for i in range(len(parts)) if not finder.find(".".join(parts[: i + 1])))
    parent = missing.rpartition(".")[0]
    above = finder.find(parent) if parent else None
    inside = finder.listing(above.folders) if above and above.folders is not None else []
    known = inside if parent else sorted({*finder.listing(None), *sys.stdlib_module_names})
    raise missing_module(name, symbol, missing, known, project_dir)


def refuse_symbol(shown: str, part: str, names: Names, things: Sequence[Thing]) -> NoReturn:
    """Raises the error for a symbol that does not exist.

    Args:
        shown: the name of the module or class in which the symbol was looked up.
        part: the symbol that does not exist.
        names: the resolver of names in source code.
        things: the possible meanings of `shown`.

    Raises:
        ResolveError: FG321, always.
    """
    key = tuple(map(id, things))
    if key not in names.spelled:
        # The objects are kept together with the result: an id can be reused after its object is freed.
        names.spelled[key] = (tuple(things), *_symbols(names, things))
    _, known, own = names.spelled[key]
    hint = near_symbol(shown, part, known, own)
    raise ResolveError(f"{shown!r} has no symbol {part!r}", code="FG321", hint=hint)


def _symbols(names: Names, things: Sequence[Thing]) -> tuple[list[str], list[str]]:
    """Returns two lists: the symbols in modules or classes, and those of them that the user's own files define."""
    known: set[str] = set()
    own: set[str] = set()
    for thing in things:
        if isinstance(thing, Module):
            if thing.name.startswith(FOLDER):
                own.update(thing.block.defined())
            known.update(_exported(thing, names, {thing.name}))
            if thing.found.folders is not None:
                known.update(names.world.finder.listing(thing.found.folders))
        elif isinstance(thing, Class):
            for base in names.mro(thing):
                if isinstance(base, Class):
                    known.update(_bound_names(base.body))
    return sorted(name for name in known if not name.startswith("__")), sorted(own)


def refuse_value(constructor: str, nodes: Sequence[ast.expr]) -> NoReturn:
    """Raises the error for a name that is bound to a literal, and so cannot be called.

    Args:
        constructor: the constructor as the config writes it.
        nodes: the literals that the name may be bound to; the error shows the first.

    Raises:
        ResolveError: FG323, always.
    """
    node = nodes[0]
    kind = type(node.value).__name__ if isinstance(node, ast.Constant) else _KINDS[type(node)]
    shown = str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
    message = f"{constructor!r} is {kind} {shown[:60]!r}, which cannot be called"
    raise ResolveError(message, code="FG323", hint="name a class or function")


_KINDS = {ast.JoinedStr: "str", ast.List: "list", ast.Tuple: "tuple", ast.Dict: "dict", ast.Set: "set"}


def _bound_names(block: Block | Parsed) -> Iterator[str]:
    yield from block.defined()
    for statement in block.plain():
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias) and node.name != "*":
                yield node.asname or node.name.partition(".")[0]


def _exported(module: Module, names: Names, seen: set[str], *, by_star: bool = False) -> Iterator[str]:
    """Yields the names of a module, including those that `from ... import *` adds to the module."""
    if module.text is None:
        return
    listed = names.listed(module)
    if listed is not None:
        yield from listed
        # `__all__` limits what a star import binds, but not what the module contains.
        if by_star:
            return
    yield from _bound_names(module.block)
    for statement in module.block.plain():
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                source = names.star_source(module, node)
                if isinstance(source, Module) and source.name not in seen:
                    seen.add(source.name)
                    inside = _exported(source, names, seen, by_star=True)
                    yield from (name for name in inside if not name.startswith("_"))
            # The keys of a literal table may be the names of lazy imports.
            elif isinstance(node, ast.Dict):
                for key in node.keys:
                    if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.isidentifier():
                        yield key.value
