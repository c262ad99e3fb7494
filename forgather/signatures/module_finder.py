"""Finds the files of modules without importing anything.

The input is a dotted name; the output is the file that Python would import. `importlib.util.find_spec` is not used,
because it imports the parent packages and calls the import hooks of other libraries.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder

# Import hooks that find no module themselves, or only modules that no config uses.
_HARMLESS_HOOKS = frozenset(
    ("_distutils_hack", "_frozen_importlib", "_frozen_importlib_external", "_pytest", "absl", "six", "transformers")
)


FOLDER = "_folder_"
"""The prefix of the generated names of packages that consist of arbitrary folders."""


@dataclass(frozen=True, slots=True)
class Found:
    """The location of a module.

    Args:
        name: the dotted name of the module.
        file: the source file of the module; None for a C extension module or a folder without `__init__.py`.
        folders: the folders that contain the submodules; None if the module is not a package.
        stub: the `.pyi` file of the module; None if there is none.
        closed: whether its files show all names in the module; False for a C extension module.
    """

    name: str
    file: str | None
    folders: tuple[str, ...] | None = None
    stub: str | None = None
    closed: bool = True

    @property
    def read(self) -> str | None:
        """The file from which the content of the module is read: source or stub; None if there is neither."""
        return self.file or self.stub


@dataclass
class Finder:
    """Finds modules on a search path.

    Args:
        path: the folders in the order in which they are searched.
    """

    path: Sequence[str]
    _known: dict[str, Found | None] = field(default_factory=dict)
    _listings: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    def find(self, name: str) -> Found | None:
        """Returns the location of a module by its dotted name; None if the module does not exist."""
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> Found | None:
        parent_name, _, leaf = name.rpartition(".")
        if not parent_name:
            # Python finds a module that is built into the interpreter before the search path.
            return _builtin(name) or self.in_folders(name, leaf, self.path)
        parent = self.find(parent_name)
        if parent is None or parent.folders is None:
            return None
        return self.in_folders(name, leaf, parent.folders)

    def package(self, folders: Sequence[str]) -> str:
        """Returns the generated name of a package that consists of the folders; equal folders give equal names."""
        name = FOLDER + blake2b("\0".join(folders).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        self._known.setdefault(name, Found(name, None, tuple(folders)))
        return name

    def in_folders(self, name: str, leaf: str, folders: Sequence[str]) -> Found | None:
        """Returns the location of a module in the given folders; None if the module does not exist.

        Args:
            name: the dotted name of the module.
            leaf: the last part of the dotted name.
            folders: the folders to search.
        """
        # Only the last part is looked up: for a dotted name, Python would look for the parent in `sys.modules`.
        spec = PathFinder.find_spec(leaf, list(folders))
        if spec is None:
            return None
        inside = spec.submodule_search_locations
        parts = None if inside is None else tuple(inside)
        origin = spec.origin
        if origin is None:
            return Found(name, None, parts)
        # As for a module in a zip archive.
        if not os.path.isfile(origin):
            return Found(name, None, parts, closed=False)
        base = origin.removesuffix(".py")
        if base != origin:
            return Found(name, origin, parts, _existing(base + ".pyi"))
        for suffix in EXTENSION_SUFFIXES:
            if origin.endswith(suffix):
                base = origin.removesuffix(suffix)
                stub = _existing(base + ".pyi") or _existing(os.path.join(base, "__init__.pyi"))
                return Found(name, None, parts, stub, closed=False)
        return Found(name, None, parts, closed=False)

    def may_be_hooked(self, name: str) -> bool:
        """Returns whether a module may be found by an import hook instead of the search path."""
        root = name.partition(".")[0]
        # A loaded module that is not on the search path came from elsewhere; `setuptools` has a hook for `distutils`.
        if root in sys.modules or root == "distutils":
            return True
        return any(type_root(hook) not in _HARMLESS_HOOKS for hook in sys.meta_path)

    def listing(self, folders: Iterable[str] | None) -> list[str]:
        """Returns the sorted names of the modules in folders; None stands for the folders of the search path."""
        places = tuple(self.path if folders is None else folders)
        if places not in self._listings:
            self._listings[places] = self._list(places)
        return self._listings[places]

    def _list(self, folders: Iterable[str]) -> list[str]:
        found = set()
        for folder in folders:
            try:
                entries = list(os.scandir(folder or "."))
            except OSError:
                continue
            for entry in entries:
                name, dot, suffix = entry.name.partition(".")
                is_package = not dot and os.path.isfile(os.path.join(entry.path, "__init__.py"))
                if name.isidentifier() and (suffix == "py" or f".{suffix}" in EXTENSION_SUFFIXES or is_package):
                    found.add(name)
        return sorted(found - {"__init__"})


def type_root(hook: object) -> str:
    """Returns the top-level package that defines an import hook."""
    module = hook.__module__ if isinstance(hook, type) else type(hook).__module__
    return str(module).partition(".")[0]


def _builtin(name: str) -> Found | None:
    return Found(name, None, closed=False) if name in sys.builtin_module_names else None


def _existing(file: str) -> str | None:
    return file if os.path.isfile(file) else None
