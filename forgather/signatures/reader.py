"""The reader of signatures, with a cache on disk.

The input is "module:symbol.path", "path/file.py:symbol", ".module:symbol" or the name of a builtin; the output is a
`Callee` with the signature, or an `Unknown` with the reason why there is none. No module is imported. A cached
signature is used until one of the files that it was read from changes. The cache contains plain data only, and a
damaged entry is ignored.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from forgather.cache_file import Digests, code_fingerprint, digest_of, read_cached, write_cached
from forgather.errors import ForgatherError, ResolveError
from forgather.signatures.module_finder import Finder
from forgather.signatures.results import UNKNOWN, Annotation, Callee, Default, Lineage, Unknown
from forgather.source import Span

if TYPE_CHECKING:
    from forgather.signatures.engine import Engine


class Reader:
    """Reads the signatures of constructors, each at most once.

    Args:
        project_dir: the folder that file imports are relative to.
        system_path: further folders from which constructors may be imported.
        cache_dir: the private folder of the cache; None to use no cache.
    """

    def __init__(self, project_dir: str, *, system_path: Sequence[str] = (), cache_dir: str | None = None) -> None:
        self.project_dir = os.path.abspath(project_dir)
        self._own_folders = tuple(system_path)
        self._finder = Finder([*sys.path, *(folder for folder in system_path if folder not in sys.path)])
        self._store = None if cache_dir is None else Store(cache_dir, self._finder, system_path)
        self._engine: Engine | None = None
        self._known: dict[tuple[str, tuple[str, ...]], Callee | Unknown | ForgatherError] = {}

    def read(self, constructor: str, searchpath: Sequence[str] = ()) -> Callee | Unknown:
        """Returns the signature of a constructor.

        Args:
            constructor: the constructor as the config writes it.
            searchpath: the `submodule_searchpath` of the call.

        Raises:
            ResolveError: FG320, FG321, FG322, FG323, FG324 or FG325 if the constructor certainly does not exist, or
                cannot be called.
            SyntaxFault: FG326 if a file of the project is not valid Python.
        """
        folders = tuple(self._absolute(folder) for folder in searchpath)
        key = constructor, folders
        if key not in self._known:
            try:
                self._known[key] = (
                    self._read(constructor, folders) if ":" in constructor else self._read_builtin(constructor)
                )
            except ForgatherError as error:
                # Errors are cached, too: the search for similar names takes longer than the rest.
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, ForgatherError):
            # A copy, because each raise adds its own traceback to the error.
            raise copy(known)
        return known

    def lineage(self, constructor: str, searchpath: Sequence[str], package: str, names: Collection[str]) -> Lineage:
        """Returns the base classes of a class, and the definitions of the given names in the class and its bases.

        Args:
            constructor: the class as the config writes it.
            searchpath: the `submodule_searchpath` of the call.
            package: a package whose classes are not searched for the names; classes of transformers are not searched
                either.
            names: the names of the methods and attributes to search for.
        """
        # Not cached between commands: only classes of the user are looked up.
        folders = tuple(self._absolute(folder) for folder in searchpath)
        try:
            return self._get_engine().lineage(constructor, folders, package, names)
        except (ForgatherError, RecursionError, SyntaxError):
            return Lineage((), ())

    def missing_module(self, module: str) -> ResolveError | None:
        """Returns the error that importing a module of a library would raise; None if the module may exist."""
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
            # The same relative name means another file in another project.
            name = f"{package}\0{file}\0{constructor}"
        kept = self._store.get(name) if self._store else None
        if kept is not None:
            return kept
        try:
            answer, used = self._get_engine().read(constructor, folders)
        except RecursionError:
            return Unknown(constructor, "its definition is nested too deeply")
        except SyntaxError:
            return Unknown(constructor, "a library that it refers to is not valid Python")
        if self._store:
            self._store.put(name, answer, used)
        return answer

    def _get_engine(self) -> Engine:
        if self._engine is None:
            from forgather.signatures.engine import Engine

            self._engine = Engine(self.project_dir, self._finder, self._own_folders)
        return self._engine

    def _read_builtin(self, name: str) -> Callee | Unknown:
        # `inspect.signature` takes milliseconds for a builtin that is written in C.
        kept = self._store.get(name) if self._store else None
        if kept is None:
            from forgather.signatures.engine import builtin_callee

            kept = builtin_callee(name)
            if self._store:
                # Python's own builtins change only with its version, which is part of the file name.
                module = "forgather.config.builtin_names"
                found = self._finder.find(module)
                self._store.put(name, kept, [(module, found.read if found else None)])
        return kept

    def _absolute(self, folder: str) -> str:
        return os.path.abspath(os.path.join(self.project_dir, os.path.expanduser(folder)))


FORM = 2
_CODE = os.path.dirname(__file__)
_SCALARS = (type(None), bool, int, float, str)
_KINDS = tuple(inspect._ParameterKind)


class Store:
    """The cache of signatures in a private folder.

    A signature that depends on no file of the project is cached for all projects, so that the first check of another
    project does not read the libraries again.

    Args:
        folder: the folder of the cache.
        finder: the finder of the current files of modules.
        ours: the folders of the finder's search path that belong to one project only.
    """

    def __init__(self, folder: str, finder: Finder, ours: Iterable[str] = ()) -> None:
        self._folder, self._finder = folder, finder
        self._own_folders = tuple(os.path.join(os.path.abspath(path), "") for path in ours)
        path = [os.path.join(os.path.abspath(path), "") for path in finder.path]
        self._shared_path = [path for path in path if path not in self._own_folders]
        self._project_path = path
        self._digest = Digests()

    def get(self, name: str) -> Callee | Unknown | None:
        """Returns the cached signature of a constructor.

        Returns None if there is no entry, or if one of the source files of the signature has changed.
        """
        # The shared entry first: most constructors are in libraries.
        kept = self._read(self._file(name, self._shared_path))
        return self._read(self._file(name, self._project_path)) if kept is None and self._own_folders else kept

    def _read(self, file: str) -> Callee | Unknown | None:
        facts = read_cached(file, FORM)
        if facts is None:
            return None
        try:
            return _restored(facts) if self._is_current(facts["made_from"]) else None
        # An entry of another form is read again from source.
        except (KeyError, TypeError, ValueError, IndexError):
            return None

    def _is_current(self, made_from: list[tuple[str, str | None, str | None]]) -> bool:
        for module, file, digest in made_from:
            found = self._finder.find(module)
            if (found.read if found else None) != file or (file is not None and self._digest(file) != digest):
                return False
        return True

    def put(self, name: str, answer: Callee | Unknown, used: Iterable[tuple[str, str | None]]) -> None:
        """Stores the signature of a constructor.

        Args:
            name: the name of the constructor.
            answer: the signature of the constructor.
            used: the names of the modules that were read, each with the path of its file; the path is None for a module
                that does not exist.
        """
        # Sorted by text, because None and a path cannot be compared.
        made_from = [(module, file, file and self._digest(file)) for module, file in sorted(used, key=str)]
        # A file that could not be read again may have changed, so the signature is not stored.
        if all(file is None or digest is not None for _, file, digest in made_from):
            is_own = any(file is not None and file.startswith(self._own_folders) for _, file, _ in made_from)
            path = self._project_path if is_own else self._shared_path
            write_cached(self._file(name, path), FORM, {**_as_plain_data(answer), "made_from": made_from})

    def _file(self, name: str, path: list[str]) -> str:
        key = "\0".join((code_fingerprint(_CODE), sys.version, *path, name))
        return os.path.join(self._folder, digest_of(os.fsencode(key)) + ".json")


def _as_plain_data(answer: Callee | Unknown) -> dict[str, Any]:
    if isinstance(answer, Unknown):
        return {"constructor": answer.constructor, "reason": answer.reason}
    return {
        "name": answer.name,
        "kind": answer.kind,
        "span": answer.span and [answer.span.file, answer.span.line],
        "gives": _plain_annotation(answer.gives),
        "callable": answer.callable_instance,
        "other_names": list(answer.other_names),
        "defined_as": answer.defined_as,
        "signatures": [
            [
                [p.name, int(p.kind), _plain_default(p.default), _plain_annotation(p.annotation)]
                for p in signature.parameters.values()
            ]
            for signature in answer.signatures
        ],
    }


def _plain_annotation(annotation: Any) -> list[Any] | None:
    if not isinstance(annotation, Annotation):
        return None
    return [annotation.text, None if annotation.accepts is None else sorted(annotation.accepts)]


def _plain_default(default: Any) -> list[Any] | None:
    if not isinstance(default, Default):
        return None
    if default.value is UNKNOWN:
        return [default.text]
    return [default.text, default.value] if isinstance(default.value, _SCALARS) else [default.text, None, True]


def _restored(facts: dict[str, Any]) -> Callee | Unknown:
    if "reason" in facts:
        return Unknown(facts["constructor"], facts["reason"])
    known: dict[Any, Annotation] = {}
    return Callee(
        name=facts["name"],
        signatures=tuple(
            # Private in `inspect`: the parameters were validated before they were stored, and a second time is slow.
            inspect.Signature([_parameter(parts, known) for parts in parameters], __validate_parameters__=False)
            for parameters in facts["signatures"]
        ),
        kind=facts["kind"],
        span=facts["span"] and Span(*facts["span"]),
        gives=_annotation(facts["gives"], known) or Annotation(""),
        callable_instance=facts["callable"],
        other_names=tuple(facts["other_names"]),
        defined_as=facts["defined_as"],
    )


def _parameter(parts: list[Any], known: dict[Any, Annotation]) -> inspect.Parameter:
    name, kind, default, annotation = parts
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        name,
        _KINDS[kind],
        default=empty if default is None else _default(*default),
        annotation=empty if annotation is None else _annotation(annotation, known),
    )


def _default(text: str, value: object = UNKNOWN, is_literal: bool = False) -> Default:
    return Default(text, ast.literal_eval(text) if is_literal else value)


def _annotation(parts: list[Any] | None, known: dict[Any, Annotation]) -> Annotation | None:
    if parts is None:
        return None
    text, words = parts
    key = (text, None if words is None else tuple(words))
    if key not in known:
        known[key] = Annotation(text, None if words is None else frozenset(words))
    return known[key]
