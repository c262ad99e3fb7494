"""Untrusted code: where it is stored, and what the user has to trust before a config may run it.

The input is names of packages and folders; the output is the folders and packages to trust, and the errors that name
them. Nothing is imported. The user decides about code in the project, and in folders that the project names.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder, all_suffixes
from pathlib import PurePath

from forgather.config.callables import Verdict, is_in_parts
from forgather.errors import ResolveError
from forgather.project.trust import VARIABLE, Trust, is_inside

_OWN_FUNCTION = "write what you need as a function in a .py file of the project, and name that"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The code that a config would run and that the list of callables does not allow.

    Args:
        folders: the real paths of the folders that contain the code.
        packages: the names of packages, or dotted names of their parts.
    """

    folders: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.folders or self.packages)

    def beyond(self, trust: Trust) -> Needs:
        """Returns the folders and packages in this object that the user does not trust."""
        folders = [folder for folder in self.folders if not trust.has_folder(folder)]
        packages = [name for name in self.packages if not trust.has_package(name)]
        return Needs(folders=tuple(folders), packages=tuple(packages))

    def plus(self, other: Needs) -> Needs:
        """Returns the union of two `Needs`; a folder inside another one is left out."""
        folders = {*self.folders, *other.folders}
        outer = [one for one in sorted(folders) if folders.isdisjoint(map(str, PurePath(one).parents))]
        return Needs(folders=tuple(outer), packages=tuple(sorted({*self.packages, *other.packages})))


@dataclass(frozen=True, slots=True)
class Places:
    """The folders in which code of a project can be stored.

    Args:
        project_dir: the project's folder.
        system_path: the further folders from which modules may be imported.
    """

    project_dir: str
    system_path: tuple[str, ...] = ()
    _homes: dict[str, str | None] = field(default_factory=dict, compare=False)
    _found: dict[str, str | None] = field(default_factory=dict, compare=False)

    def owner(self, folder: str) -> str:
        """Returns the folder that a user has to trust for code in `folder`: `folder`, or the project around it."""
        real, project = os.path.realpath(folder), os.path.realpath(self.project_dir)
        return project if is_inside(real, project) else real

    def home(self, package: str) -> str | None:
        """Returns the folder that a user has to trust for a package; None if the package is installed or missing."""
        if package not in self._homes:
            self._homes[package] = self._home(package)
        return self._homes[package]

    def exists(self, module: str) -> bool:
        """Returns whether a package, or a module inside a package, exists."""
        package, *inner = module.split(".")
        where = "forgather" if package == "forgather" else self._where(package)
        if where is None or not inner:
            return where is not None
        base = os.path.join(_forgather() if package == "forgather" else os.path.dirname(where), *inner)
        return os.path.isdir(base) or any(os.path.isfile(base + suffix) for suffix in all_suffixes())

    def _where(self, package: str) -> str | None:
        if package not in self._found:
            self._found[package] = _where(package, self.system_path)
        return self._found[package]

    def _home(self, package: str) -> str | None:
        where = self._where(package)
        if where is None or any(is_inside(where, installed) for installed in _installed()):
            return None
        roots = [self.project_dir, *self.system_path]
        # Then Python imports modules of the working folder, too.
        if "" in sys.path or os.getcwd() in sys.path:
            roots.append(os.getcwd())
        return next((self.owner(root) for root in roots if is_inside(where, os.path.realpath(root))), None)


@cache
def _installed() -> tuple[str, ...]:
    # `sysconfig` gives the same folders, but importing it takes longer than this module.
    return tuple(
        os.path.realpath(folder) for folder in (os.path.dirname(os.__file__), *site.getsitepackages(), _forgather())
    )


def _forgather() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _where(package: str, further: Iterable[str]) -> str | None:
    """Returns the real path of a package's file or folder without importing the package; None if there is none."""
    if package in sys.builtin_module_names or package == "forgather":
        return None
    path = [*sys.path, *(folder for folder in further if folder not in sys.path)]
    # importlib.util.find_spec would ask sys.modules and the import hooks of installed packages first.
    spec = PathFinder.find_spec(package, path)
    inside = list(spec.submodule_search_locations or ()) if spec else []
    origin = spec.origin if spec and spec.has_location else next(iter(inside), None)
    return os.path.realpath(origin) if origin else None


def denied_error(verdict: Verdict) -> ResolveError:
    """Returns the error for an object that no config may call."""
    message = f"no config may call {verdict.name!r}: {verdict.why}"
    error: ResolveError = ResolveError(message, code="FG339", hint=_OWN_FUNCTION)
    return error


def untrusted_error(needs: Needs) -> ResolveError:
    """Returns the error for code that the user has to trust first."""
    error: ResolveError = ResolveError(untrusted_message(needs), code="FG440", hint=trust_hint(needs))
    return error


def name_to_trust(module: str) -> str:
    """Returns the name to trust for a module: its package, or the module itself if its package is listed in parts.

    A package is listed in parts if every config may call some of its parts.
    """
    return module if is_in_parts(module) else module.partition(".")[0]


def untrusted_message(needs: Needs) -> str:
    """Returns the message that the user does not trust the code yet."""
    what = [f"runs code of {', '.join(map(repr, needs.folders))}"] if needs.folders else []
    what += [f"calls {', '.join(map(_called, needs.packages))}"] if needs.packages else []
    return f"the config {' and '.join(what)}, which you do not trust yet"


def _called(module: str) -> str:
    package = module.partition(".")[0]
    return f"{module!r}, a part of {package} that not every config may call" if is_in_parts(module) else repr(module)


def trust_hint(needs: Needs) -> str:
    """Returns the hint that shows how the user can trust the code."""
    import shlex

    words = shlex.join([*needs.folders, *needs.packages])
    each = os.pathsep.join([*needs.folders, *needs.packages])
    return f"look at it, then: fgcli trust {words}  (in an unattended run: {VARIABLE}={shlex.quote(each)})"
