"""Imports the constructors that a config names.

The input is "module:symbol.path", "path/file.py:symbol", ".module:symbol" or the name of a builtin; the output is the
object. Invariants: `sys.path` is never changed; a file of a project is imported under a module name made from its
folder, so `json.py` or `torch.py` in a project neither shadows a library nor is shadowed by one.

A file import makes a package of the file's folder (and of the `submodule_searchpath` of the call). Files in the same
folder are therefore modules of that package: `from .blocks import Layer` imports the `blocks.py` next to the file.
`import blocks` imports the library of that name.
"""

from __future__ import annotations

import builtins
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from forgather.config import builtin_names
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

_PREFIX = "_forgather_folder_"


class Guard:
    """The base class of guards, which decide what may be imported and called; the base class allows everything."""

    def before_import(self, module: str) -> None:
        """Raises a `ResolveError` if a module must not be imported."""

    def before_files(self, folders: Sequence[str]) -> None:
        """Raises a `ResolveError` if the Python files in these folders must not be run."""

    def found(self, constructor: str, walked: Sequence[tuple[str, Any]]) -> Any:
        """Returns the object to call for a constructor.

        Args:
            constructor: the name of the constructor in the node.
            walked: the module and then each part of the symbol, as pairs of name and object; the last pair is the
                constructor.

        Raises:
            ResolveError: if the constructor must not be called.
        """
        return walked[-1][1]

    def arguments(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises a `ResolveError` if a function must not be called with these arguments."""

    def later(self, function: Any) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], None] | None:
        """Returns a function that checks the arguments of each call of a partial; None to allow all arguments."""
        return None


class Resolver:
    """Finds the objects that constructors name.

    Args:
        project_dir: the folder to which file imports are relative.
        searchpath: the folders for `.module` if the call has no `submodule_searchpath` of its own.
        guard: the object that decides what may be imported and called.
    """

    def __init__(self, project_dir: str, searchpath: Sequence[str] = (), guard: Guard | None = None) -> None:
        self.project_dir = os.path.abspath(project_dir)
        self.searchpath = tuple(self._absolute(folder) for folder in searchpath)
        self.guard = guard or Guard()

    def resolve(self, constructor: str, searchpath: Sequence[str] = ()) -> Any:
        """Returns the object that a constructor names; the module of the constructor is imported.

        Args:
            constructor: the name of the constructor in the node.
            searchpath: the `submodule_searchpath` of the call.

        Raises:
            ResolveError: FG320 to FG325 if there is no such module, file or symbol.
            Exception: any exception that the import of the module raises.
        """
        # From the right, because the path of a file may contain a colon.
        module_name, colon, symbol = constructor.rpartition(":")
        if not colon:
            home = builtin_names if constructor in SHORT else builtins
            return self.guard.found(constructor, [(home.__name__, home), (constructor, self._short(constructor))])
        folders = tuple(self._absolute(folder) for folder in searchpath)
        if module_name.endswith(".py") or "/" in module_name:
            module = self._file(module_name, folders)
        elif module_name.startswith("."):
            module = self._relative(module_name, folders or self.searchpath)
        else:
            self.guard.before_import(module_name)
            module = _import(module_name, symbol, self.project_dir)
        return self.guard.found(constructor, self._walk(module, symbol, module_name))

    def _absolute(self, folder: str) -> str:
        return os.path.abspath(os.path.join(self.project_dir, os.path.expanduser(folder)))

    def _short(self, name: str) -> Any:
        if name in SHORT:
            return SHORT[name]
        found = getattr(builtins, name, None)
        if found is None:
            raise missing_builtin(name)
        return found

    def _file(self, name: str, folders: tuple[str, ...]) -> ModuleType:
        file = self._absolute(name)
        folder, base = os.path.split(file)
        if not os.path.isfile(file) or not base.endswith(".py"):
            raise missing_file(name, file, self.project_dir)
        # Before the import, which runs the code of the file.
        self.guard.before_files((folder, *folders))
        return importlib.import_module(f"{_package((folder, *folders))}.{base.removesuffix('.py')}")

    def _relative(self, name: str, folders: tuple[str, ...]) -> ModuleType:
        if not folders:
            raise missing_folders(name)
        self.guard.before_files(folders)
        package = _package(folders)
        full = f"{package}{name}"
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError as error:
            if not _is_missing(error, full):
                raise
            found = [module.name for module in pkgutil.iter_modules(list(folders))]
            raise missing_relative_module(name, folders, found) from None

    def _walk(self, module: ModuleType, symbol: str, module_name: str) -> list[tuple[str, Any]]:
        """Returns the module and each part of the symbol, as pairs of name and object."""
        found: Any = module
        walked = module.__name__
        trail = [(module_name, found)]
        for part in symbol.split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                # `torch:nn.functional.relu`: a submodule is an attribute only after something has imported it.
                submodule = self._submodule(found, part)
                if submodule is None:
                    shown = module_name if found is module else f"{module_name}:{walked}"
                    # `dir` also lists what a package exports lazily, as transformers does.
                    known = [name for name in dir(found) if not name.startswith("__")]
                    # In a file of the project, a misspelling of its own class is more likely than one of an import.
                    own = _defined(found) if module.__name__.startswith(_PREFIX) else []
                    hint = near_symbol(shown, part, known, own)
                    raise ResolveError(f"{shown!r} has no symbol {part!r}", code="FG321", hint=hint) from None
                found = submodule
            walked = part if walked == module.__name__ else f"{walked}.{part}"
            trail.append((part, found))
        return trail

    def _submodule(self, parent: Any, part: str) -> ModuleType | None:
        if not isinstance(parent, ModuleType) or not hasattr(parent, "__path__"):
            return None
        name = f"{parent.__name__}.{part}"
        # Modules of a project's folder were allowed together, by `before_files`.
        if not parent.__name__.startswith(_PREFIX):
            self.guard.before_import(name)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if _is_missing(error, name):
                return None
            raise


def _package(folders: tuple[str, ...]) -> str:
    """Returns the name of the package whose modules are the files in `folders`; the package is created on first use."""
    # The name is a hash of the folders, so that two projects with equal file names never share a module.
    # Two names of one folder must not import its files twice.
    real = [os.path.realpath(folder) for folder in dict.fromkeys(folders)]
    name = _PREFIX + sha256("\0".join(real).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    # One package for equal folders, so that a class imported by two calls is one class.
    if name not in sys.modules:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = real
        package = ModuleType(name, f"Files of {real[0]}")
        package.__path__ = real
        package.__spec__ = spec
        sys.modules[name] = package
        # Python caches listings of folders, and a file may have been written since.
        importlib.invalidate_caches()
    return name


def _import(name: str, symbol: str, project_dir: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that exists but fails to import another one keeps its own exception.
        if not _is_missing(error, name):
            raise
        missing = error.name or name
        raise missing_module(name, symbol, missing, _beside(missing), project_dir) from None


def _is_missing(error: ModuleNotFoundError, name: str) -> bool:
    """Returns whether the missing module is `name` or a package above it, and not a module that `name` imports."""
    return error.name is not None and (name == error.name or name.startswith(error.name + "."))


def _defined(module: Any) -> list[str]:
    """Returns the names of the classes and functions that a module defines and does not import."""
    name = getattr(module, "__name__", None)
    found = {word: value for word, value in vars(module).items() if not word.startswith("__") and callable(value)}
    return [word for word, value in found.items() if getattr(value, "__module__", None) == name]


def _beside(name: str) -> list[str]:
    """Returns the names of the modules that exist next to a missing module."""
    parent = name.rpartition(".")[0]
    if not parent:
        # Built-in modules such as `sys` are not found by iter_modules.
        return sorted({module.name for module in pkgutil.iter_modules()} | set(sys.stdlib_module_names))
    path = getattr(sys.modules.get(parent), "__path__", None)
    return [] if path is None else sorted(module.name for module in pkgutil.iter_modules(path))
