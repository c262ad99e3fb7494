"""The guard of a construction: only code that is listed as allowed, or that the user trusts, is imported and called.

The input is a project and a `Trust`; the output is a `Guard` for the resolver. The list is `callables.json` in
`forgather/config`, which contains the callables that every config may call, and those that no config may call. A name
is checked before its module is imported, and the object that was found is checked again. What the list denies cannot be
called even if the user trusts it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from importlib.machinery import PathFinder
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

from forgather.config.builtin_names import SHORT, call
from forgather.config.callables import (
    PLAIN,
    Required,
    Standing,
    Verdict,
    commands_of,
    is_in_parts,
    judge_found,
    judge_module,
    judge_name,
    judge_nameless,
    names_of,
    required_of,
)
from forgather.config.partials import PartialObject, Recipe
from forgather.config.remote import containers, may_run_remote_code, named_arguments, refuse_remote_code
from forgather.config.resolve import Guard
from forgather.errors import ResolveError
from forgather.project.metadata import ProjectMeta
from forgather.project.trust import Trust
from forgather.project.untrusted import Needs, Places, denied_error, name_to_trust, untrusted_error

_CALLED = (FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, type, partial)


def _exists(module: str) -> bool:
    """Returns whether a module may exist, as far as this is known without importing unlisted code."""
    parent, _, leaf = module.rpartition(".")
    if not parent:
        return module in sys.builtin_module_names or PathFinder.find_spec(module, sys.path) is not None
    if judge_module(parent).standing is not Standing.ALLOWED:
        return _exists(parent)
    folders = getattr(import_module(parent), "__path__", None)
    return folders is not None and PathFinder.find_spec(leaf, list(folders)) is not None


class ProjectGuard(Guard):
    """Lets a project call what the list of callables allows, and what the user trusts.

    Args:
        meta: the project.
        trust: the function that returns what the user trusts; it is called when something is not on the list.
    """

    def __init__(self, meta: ProjectMeta, trust: Callable[[], Trust]) -> None:
        self._places = Places(meta.project_dir, meta.system_path)
        self._tell = trust

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickling, with the current trust: data loader workers may receive partials."""
        return {"_places": self._places, "_trust": self._trust}

    @cached_property
    def _trust(self) -> Trust:
        return self._tell()

    def before_import(self, module: str) -> None:
        """Raises an error if a module is denied, or belongs to a package or folder that the user does not trust.

        Raises:
            ResolveError: FG339 if the module is denied; FG440 if the user has to trust it first.
        """
        package = module.partition(".")[0]
        home = self._places.home(package)
        if home is not None:
            return self.before_files((home,))
        verdict = judge_module(module)
        if verdict.standing is Standing.ALLOWED or not _exists(module):
            # A failing import runs no code, and its error says what is missing.
            return None
        if verdict.standing is Standing.DENIED:
            raise denied_error(verdict)
        if verdict.standing is Standing.UNLISTED and not self._trust.has_package(module):
            raise untrusted_error(Needs(packages=(name_to_trust(module),)))
        return None

    def before_files(self, folders: Sequence[str]) -> None:
        """Raises an error if the user does not trust the code in one of the folders.

        Raises:
            ResolveError: FG440 if the user has to trust a folder first.
        """
        needs = Needs(folders=tuple(self._places.owner(folder) for folder in folders)).beyond(self._trust)
        if needs:
            raise untrusted_error(needs)

    def found(self, constructor: str, walked: Sequence[tuple[str, Any]]) -> Any:
        """Returns the object to call, after checking the object and each module on the way to it.

        Args:
            constructor: the constructor as the config names it.
            walked: the parts of the name, each with the object that it refers to.

        Raises:
            ResolveError: FG339 if the object or a module is denied; FG440 if the user has to trust it first.
        """
        found = walked[-1][1]
        modules = [at for at, (_, thing) in enumerate(walked[:-1]) if at and isinstance(thing, ModuleType)]
        for at in modules:
            self.before_import(walked[at][1].__name__)
        last = modules[-1] if modules else 0
        module = walked[last][1].__name__ if modules else walked[0][0]
        symbol = ".".join(part for part, _ in walked[last + 1 :])
        own = self._is_own(module)
        # An allowed name can be an alias of a denied object, and an object need not know its name: both are judged.
        by_name, by_object = judge_name("own" if own else module, symbol), judge_found(found)
        if by_name.standing is Standing.ALLOWED and not by_object:
            by_name = judge_nameless(module, symbol)
        verdicts = [*([] if own and by_name.standing is not Standing.DENIED else [by_name]), *by_object]
        for verdict in verdicts:
            self._admit(verdict, is_own=own)
        # `call` gets the function to call as an argument, which has to be checked, too.
        return self._call if found is SHORT["call"] else found

    def _is_own(self, module: str) -> bool:
        """Returns whether a module is the user's own code, or part of an unlisted package that the user trusts."""
        if module.startswith(".") or "/" in module or module.endswith(".py"):
            return True
        root = module.partition(".")[0]
        return self._places.home(root) is not None or judge_module(module).standing is Standing.UNLISTED

    def _admit(self, verdict: Verdict, *, is_own: bool) -> None:
        if verdict.standing is Standing.DENIED:
            raise denied_error(verdict)
        module = verdict.name.partition(":")[0]
        if verdict.standing is Standing.UNLISTED and not is_own and not self._trust.has_package(module):
            home = self._places.home(module.partition(".")[0])
            needs = Needs(folders=(home,)) if home else Needs(packages=(name_to_trust(module),))
            if needs.beyond(self._trust):
                raise untrusted_error(needs)

    def _call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The implementation of the built-in function `call`: checks an object and its arguments, and calls it."""
        # A partial judges its arguments when it is called.
        if not isinstance(function, PartialObject):
            self._judge_value(function)
            self.arguments(function, args, kwargs)
        return call(function, *args, **kwargs)

    def _judge_value(self, value: Any) -> None:
        """Raises an error if a callable that a call has returned, or that is an argument, must not be called."""
        while isinstance(value, partial):
            value = value.func
        if isinstance(value, PartialObject):
            return
        is_plain = isinstance(value, _CALLED)
        for verdict in judge_found(value):
            # A function of trusted code may be anything; an object is the result of a call that was judged.
            self._admit(verdict, is_own=not (is_plain and is_in_parts(verdict.name.partition(":")[0])))

    def arguments(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises an error if an argument would make a loader run remote code, or is a callable that no config may call.

        Args:
            function: the object that is called.
            args: the positional arguments.
            kwargs: the keyword arguments.

        Raises:
            ResolveError: FG339 if an argument is denied; FG340 if an argument has a value that is not allowed; FG440 if
                the user has to trust an argument first.
        """
        inside = list(containers([args, kwargs]))
        for value in (value for container in inside for value in _values(container)):
            if isinstance(value, _CALLED):
                self._judge_value(value)
        self._at_call(function, args, kwargs)

    def later(self, function: Any) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], None] | None:
        """Returns the function that checks a partial's arguments at each call; None if none needs a check."""
        if may_run_remote_code(function):
            return self._at_call
        return self._rules if required_of(function) or _commands(function) else None

    def _at_call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._rules(function, args, kwargs)
        refuse_remote_code(function, args, kwargs, lambda folder: not self._needs(folder))

    def _rules(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        rules, commands = required_of(function), _commands(function)
        given = named_arguments(function, args, kwargs) if rules or commands else {}
        if any(given.get(name) is not None for name in commands):
            # A command is code of the project that names it.
            self.before_files((self._places.project_dir,))
        deep = [given, *_mappings([given, *args])] if any(rule.deep for rule in rules) else []
        for rule in rules:
            for name, value in (
                (name, value) for it in (deep if rule.deep else (given,)) for name, value in it.items()
            ):
                if rule.is_about(name) and not rule.allows(value):
                    raise _refused(rule, name, value)

    def _needs(self, folder: str) -> Needs:
        return Needs(folders=(self._places.owner(folder),)).beyond(self._trust)


def _commands(function: Any) -> list[str]:
    """Returns the names of the arguments of a function that are commands to run."""
    return [name for found in names_of(function) for name in commands_of(*found.split(":", 1))]


def _mappings(values: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    return (container for container in containers(values) if isinstance(container, Mapping))


def _values(container: Mapping[Any, Any] | Sequence[Any]) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, Mapping) else container)


def _refused(rule: Required, name: str, found: Any) -> ResolveError:
    shown = "known only when it is called" if isinstance(found, Recipe) else repr(found)[:40]
    message = f"{name} is {shown}, and {rule.why}"
    hint = f"write {name}: {rule.value}, or leave it out"
    if rule.value in (None, PLAIN):
        hint = "leave it out" if rule.value is None else "write numbers, true or false, or leave it out"
    error: ResolveError = ResolveError(message, code="FG340", hint=hint).about(name)
    return error
