"""The reader: names of constructors to signatures.

Takes "module:symbol.path", "path/file.py:symbol", ".module:symbol" or a builtin's name; gives a `Callee` or `Unknown`.
Keeps true: what was read before, and has not changed, is not read again; nothing is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from copy import copy
from typing import TYPE_CHECKING

from forgather.errors import ForgatherError, ResolveError
from forgather.signatures.module_finder import Finder
from forgather.signatures.results import Callee, Lineage, Unknown
from forgather.signatures.store import Store

if TYPE_CHECKING:
    from forgather.signatures.engine import Engine


class Reader:
    """Reads signatures for one command.

    Args:
        project_dir: folder that file imports are relative to.
        system_path: further folders that constructors may be imported from.
        cache_dir: private folder for what was read; None keeps nothing.
    """

    def __init__(self, project_dir: str, *, system_path: Sequence[str] = (), cache_dir: str | None = None) -> None:
        self.project_dir = os.path.abspath(project_dir)
        self._ours = tuple(system_path)
        self._finder = Finder([*sys.path, *(folder for folder in system_path if folder not in sys.path)])
        self._store = None if cache_dir is None else Store(cache_dir, self._finder, system_path)
        self._engine: Engine | None = None
        self._known: dict[tuple[str, tuple[str, ...]], Callee | Unknown | ForgatherError] = {}

    def read(self, constructor: str, searchpath: Sequence[str] = ()) -> Callee | Unknown:
        """Returns how a constructor may be called.

        Args:
            constructor: as a node holds it.
            searchpath: the `submodule_searchpath` of the call.

        Raises:
            ResolveError: there surely is no such module, file or symbol.
            SyntaxFault: FG326, a file of the project is not valid Python.
        """
        folders = tuple(self._absolute(folder) for folder in searchpath)
        key = constructor, folders
        if key not in self._known:
            try:
                self._known[key] = self._read(constructor, folders) if ":" in constructor else self._short(constructor)
            except ForgatherError as error:
                # What there is not is looked for once, too: the search for near names is the long part.
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, ForgatherError):
            raise copy(known)
        return known

    def lineage(self, constructor: str, searchpath: Sequence[str], package: str, names: Collection[str]) -> Lineage:
        """Returns what a class comes from, and which of some names it binds in front of the classes of a package.

        Nothing of this is kept: it is asked for classes of the user's own.

        Args:
            constructor: as a node holds it.
            searchpath: the `submodule_searchpath` of the call.
            package: the package whose classes end the search.
            names: the names to look for.
        """
        folders = tuple(self._absolute(folder) for folder in searchpath)
        try:
            return self._reading().lineage(constructor, folders, package, names)
        except (ForgatherError, RecursionError, SyntaxError):
            return Lineage((), ())

    def lacks(self, module: str) -> ResolveError | None:
        """Returns the error that importing a library's module gives; None where it exists, or may."""
        if self._finder.find(module) is not None:
            return None
        try:
            self.read(f"{module}:_")
        except ForgatherError as error:
            return error if isinstance(error, ResolveError) and error.code == "FG320" else None
        return None

    def _read(self, constructor: str, folders: tuple[str, ...]) -> Callee | Unknown:
        name = constructor
        place = constructor.rpartition(":")[0]
        if place.startswith(".") or "/" in place or place.endswith(".py"):
            file = self._absolute(place)
            around = folders if place.startswith(".") and "/" not in place else (os.path.dirname(file), *folders)
            package = self._finder.package(tuple(os.path.realpath(folder) for folder in dict.fromkeys(around)))
            name = f"{package}\0{file}\0{constructor}"
        kept = self._store.find(name) if self._store else None
        if kept is not None:
            return kept
        try:
            answer, used = self._reading().read(constructor, folders)
        except RecursionError:
            return Unknown(constructor, "its definition is nested too deeply")
        except SyntaxError:
            return Unknown(constructor, "a library that it leads to is not valid Python")
        if self._store:
            self._store.keep(name, answer, used)
        return answer

    def _reading(self) -> Engine:
        if self._engine is None:
            from forgather.signatures.engine import Engine

            self._engine = Engine(self.project_dir, self._finder, self._ours)
        return self._engine

    def _short(self, name: str) -> Callee | Unknown:
        # Python takes milliseconds to tell the signature of what is written in C.
        kept = self._store.find(name) if self._store else None
        if kept is None:
            from forgather.signatures.engine import known_callee

            kept = known_callee(name)
            if self._store:
                module = "forgather.config.builtin_names"
                found = self._finder.find(module)
                self._store.keep(name, kept, [(module, found.read if found else None)])
        return kept

    def _absolute(self, folder: str) -> str:
        return os.path.abspath(os.path.join(self.project_dir, os.path.expanduser(folder)))
