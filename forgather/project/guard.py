"""The guard of constructions: only what is on the list, or what the user trusts, is imported and called.

Takes a project's facts and a `Trust`, gives a `Guard` for the resolver. Keeps true: a name is judged before its module
is imported, and the object that was found after; what the list denies no trust allows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from forgather.config.callables import Standing, Verdict, judge_found, judge_module, judge_name, required_of
from forgather.config.partials import PartialObject, Recipe
from forgather.config.remote import named_arguments, refuse_remote_code
from forgather.config.resolve import Guard
from forgather.config.shortnames import SHORT, call
from forgather.errors import ResolveError
from forgather.project.meta import ProjectMeta
from forgather.project.trust import Trust
from forgather.project.untrusted import Needs, Places, denied, untrusted


def _exists(module: str) -> bool:
    """Returns whether there may be a module, as far as that is known without importing what is not listed."""
    parent, _, leaf = module.rpartition(".")
    if not parent:
        return module in sys.builtin_module_names or PathFinder.find_spec(module, sys.path) is not None
    if judge_module(parent).standing is not Standing.ALLOWED:
        return _exists(parent)
    folders = getattr(import_module(parent), "__path__", None)
    return folders is not None and PathFinder.find_spec(leaf, list(folders)) is not None


class ProjectGuard(Guard):
    """Lets a project call what is on the list, and what the user trusts.

    Args:
        meta: the project.
        trust: tells what the user trusts; asked where something is not on the list.
    """

    def __init__(self, meta: ProjectMeta, trust: Callable[[], Trust]) -> None:
        self._places = Places(meta.project_dir, meta.system_path)
        self._tell = trust

    @cached_property
    def _trust(self) -> Trust:
        return self._tell()

    def before_import(self, module: str) -> None:
        """Raises where a module is denied, or of a package that is not trusted."""
        package = module.partition(".")[0]
        home = self._places.home(package)
        if home is not None:
            return self.before_files((home,))
        verdict = judge_module(module)
        if verdict.standing is Standing.ALLOWED or not _exists(module):
            # An import that fails runs nothing, and says what is missing.
            return None
        if verdict.standing is Standing.DENIED:
            raise denied(verdict)
        if verdict.standing is Standing.UNLISTED and not self._trust.has_package(package):
            raise untrusted(Needs(packages=(package,)))
        return None

    def before_files(self, folders: Sequence[str]) -> None:
        """Raises where the code of a folder is not trusted."""
        needs = Needs(folders=tuple(self._places.owner(folder) for folder in folders)).beyond(self._trust)
        if needs:
            raise untrusted(needs)

    def found(self, constructor: str, walked: Sequence[tuple[str, Any]]) -> Any:
        """Returns what is called; raises where it is denied, or was reached through what is."""
        found = walked[-1][1]
        modules = [at for at, (_, thing) in enumerate(walked[:-1]) if at and isinstance(thing, ModuleType)]
        for at in modules:
            self.before_import(walked[at][1].__name__)
        last = modules[-1] if modules else 0
        module = walked[last][1].__name__ if modules else walked[0][0]
        symbol = ".".join(part for part, _ in walked[last + 1 :])
        own = self._is_own(module)
        by_name = judge_name("own" if own else module, symbol)
        verdicts = [*([] if own and by_name.standing is not Standing.DENIED else [by_name]), *judge_found(found)]
        for verdict in verdicts:
            self._admit(verdict, is_own=own)
        return self._call if found is SHORT["call"] else found

    def _is_own(self, module: str) -> bool:
        """Returns whether a module is code that was let in by trust; what it offers is its own business."""
        if module.startswith(".") or "/" in module or module.endswith(".py"):
            return True
        root = module.partition(".")[0]
        return self._places.home(root) is not None or judge_module(module).standing is Standing.UNLISTED

    def _admit(self, verdict: Verdict, *, is_own: bool) -> None:
        if verdict.standing is Standing.DENIED:
            raise denied(verdict)
        package = verdict.name.partition(":")[0].partition(".")[0]
        if verdict.standing is Standing.UNLISTED and not is_own and not self._trust.has_package(package):
            home = self._places.home(package)
            needs = Needs(folders=(home,)) if home else Needs(packages=(package,))
            if needs.beyond(self._trust):
                raise untrusted(needs)

    def _call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What the short name `call` is: it calls what was let in."""
        if not isinstance(function, PartialObject):
            for verdict in judge_found(function):
                self._admit(verdict, is_own=True)
        return call(function, *args, **kwargs)

    def arguments(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises where an argument makes a loader run code."""
        rules = required_of(function)
        given = named_arguments(function, args, kwargs) if rules else {}
        for rule in rules:
            if rule.name in given and given[rule.name] is not rule.value:
                found = given[rule.name]
                shown = "known only when it is called" if isinstance(found, Recipe) else repr(found)[:40]
                message = f"{rule.name} is {shown}, and {rule.why}"
                hint = "leave it out" if rule.value is None else f"write {rule.name}: {rule.value}, or leave it out"
                raise ResolveError(message, code="FG340", hint=hint).about(rule.name)
        refuse_remote_code(function, args, kwargs, lambda folder: not self._needs(folder))

    def _needs(self, folder: str) -> Needs:
        return Needs(folders=(self._places.owner(folder),)).beyond(self._trust)
