"""The reader: names of constructors to signatures, and the answers that are kept between commands.

Takes "module:symbol.path", "path/file.py:symbol", ".module:symbol" or a builtin's name; gives a `Callee` or `Unknown`.
Keeps true: what was read before, and has not changed, is not read again; nothing is imported; entries of the store are
data, and a damaged one counts as none.
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
            return Unknown(constructor, "a library that it refers to is not valid Python")
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


FORM = 2
_CODE = os.path.dirname(__file__)
_SCALARS = (type(None), bool, int, float, str)
_KINDS = tuple(inspect._ParameterKind)


class Store:
    """Entries in a private folder.

    Args:
        folder: where they lie.
        finder: tells where modules are now.
        ours: folders of the finder's path that belong to one project. What no file in them decides is kept for every
            project: the first check of a new one reads no library again.
    """

    def __init__(self, folder: str, finder: Finder, ours: Iterable[str] = ()) -> None:
        self._folder, self._finder = folder, finder
        self._ours = tuple(os.path.join(os.path.abspath(path), "") for path in ours)
        path = [os.path.join(os.path.abspath(path), "") for path in finder.path]
        self._everyone = [path for path in path if path not in self._ours]
        self._project = path
        self._digest = Digests()

    def find(self, name: str) -> Callee | Unknown | None:
        """Returns what is kept under a name; None where there is nothing, or it does not hold any more."""
        kept = self._read(self._file(name, self._everyone))
        return self._read(self._file(name, self._project)) if kept is None and self._ours else kept

    def _read(self, file: str) -> Callee | Unknown | None:
        facts = read_cached(file, FORM)
        if facts is None:
            return None
        try:
            return _restored(facts) if self._holds(facts["made_from"]) else None
        except (KeyError, TypeError, ValueError, IndexError):
            return None

    def _holds(self, made_from: list[tuple[str, str | None, str | None]]) -> bool:
        for module, file, digest in made_from:
            found = self._finder.find(module)
            if (found.read if found else None) != file or (file is not None and self._digest(file) != digest):
                return False
        return True

    def keep(self, name: str, answer: Callee | Unknown, used: Iterable[tuple[str, str | None]]) -> None:
        """Keeps an answer, with the modules that decided it."""
        made_from = [(module, file, file and self._digest(file)) for module, file in sorted(used, key=str)]
        if all(file is None or digest is not None for _, file, digest in made_from):
            is_own = any(file is not None and file.startswith(self._ours) for _, file, _ in made_from)
            path = self._project if is_own else self._everyone
            write_cached(self._file(name, path), FORM, {**_plain(answer), "made_from": made_from})

    def _file(self, name: str, path: list[str]) -> str:
        key = "\0".join((code_fingerprint(_CODE), sys.version, *path, name))
        return os.path.join(self._folder, digest_of(os.fsencode(key)) + ".json")


def _plain(answer: Callee | Unknown) -> dict[str, Any]:
    if isinstance(answer, Unknown):
        return {"constructor": answer.constructor, "reason": answer.reason}
    return {
        "name": answer.name,
        "kind": answer.kind,
        "span": answer.span and [answer.span.file, answer.span.line],
        "gives": _plain_annotation(answer.gives),
        "callable": answer.callable_instance,
        "other_names": list(answer.other_names),
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
            inspect.Signature([_parameter(parts, known) for parts in parameters], __validate_parameters__=False)
            for parameters in facts["signatures"]
        ),
        kind=facts["kind"],
        span=facts["span"] and Span(*facts["span"]),
        gives=_annotation(facts["gives"], known) or Annotation(""),
        callable_instance=facts["callable"],
        other_names=tuple(facts["other_names"]),
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
