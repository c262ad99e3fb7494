"""`!partial` objects, and the recipes for what each of their calls builds anew.

Takes built arguments and recipes, gives a callable. Keeps true: what a partial shares between its calls was
built once, by the construction that made it; a recipe holds no graph node and no construction, so that a
partial can be pickled wherever its parts can.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forgather.config.graph import SPREAD, Call, ContainerKind
from forgather.config.path import GraphPath, Key, format_path
from forgather.errors import BuildNote, GraphError, ResolveError
from forgather.source import Span


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where a call stands, for the note on an exception that it raises."""

    constructor: str
    path: str
    span: Span | None


def call_noted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], place: CallPlace) -> Any:
    """Returns `function(*args, **kwargs)`; an exception gets one `BuildNote`, at the innermost place."""
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        note_once(error, BuildNote(place.constructor, place.path, place.span))
        raise


Check = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], None]
"""Raises a `ResolveError` where a function must not be called with arguments."""


def call_checked(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    place: CallPlace,
    check: Check | None,
) -> Any:
    """Returns `function(*args, **kwargs)` where all arguments, those that came later too, are let in."""
    if check is not None:
        try:
            check(function, args, kwargs)
        except ResolveError as error:
            error.span, error.path = error.span or place.span, error.path or place.path
            raise
    return call_noted(function, args, kwargs, place)


def note_once(error: BaseException, note: BuildNote) -> None:
    """Adds `note` to an exception that has no `BuildNote` yet."""
    if not any(isinstance(old, BuildNote) for old in getattr(error, "__notes__", ())):
        error.add_note(note)


class Recipe(ABC):
    """A value that each call of a partial builds anew."""

    __slots__ = ()

    @abstractmethod
    def build(self, memo: dict[int, Any]) -> Any:
        """Returns a new value; `memo` holds what this call has built already."""


def built(value: Any, memo: dict[int, Any]) -> Any:
    """Returns what a recipe builds, or the value itself."""
    return value.build(memo) if isinstance(value, Recipe) else value


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FreshCall(Recipe):
    """A factory inside a partial: called at every place, in every call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    latent: Mapping[str, Any]
    place: CallPlace
    check: Check | None = None

    def __repr__(self) -> str:
        return f"<{self.place.constructor} anew>"

    def build(self, memo: dict[int, Any]) -> Any:
        """Returns what the function returns for newly built arguments."""
        args = tuple(built(value, memo) for value in self.args)
        kwargs = {key: built(value, memo) for key, value in (*self.kwargs.items(), *self.latent.items())}
        return call_checked(self.function, args, kwargs, self.place, self.check)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FreshContainer(Recipe):
    """A container that holds a factory: one object per call where it is shared, else one per place."""

    kind: ContainerKind
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    shared: bool

    def __repr__(self) -> str:
        return f"<{assemble(self.kind, self.keys, self.values)!r} anew>"

    def build(self, memo: dict[int, Any]) -> Any:
        """Returns a new container."""
        if self.shared and id(self) in memo:
            return memo[id(self)]
        container = assemble(self.kind, self.keys, tuple(built(value, memo) for value in self.values))
        if self.shared:
            memo[id(self)] = container
        return container


def assemble(kind: ContainerKind, keys: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
    """Returns the Python container of a kind; `keys` count for `DICT` only."""
    if kind is ContainerKind.DICT:
        return dict(zip(keys, values, strict=True))
    return values if kind is ContainerKind.TUPLE else list(values)


class PartialObject:
    """A callable with some arguments given: what `!partial` builds.

    Positional arguments of a call are appended, its keywords are merged over. `keywords` and `args` hold a
    `Recipe` for what each call builds anew.

    Args:
        func: what is called in the end.
        args: first positional arguments.
        keywords: keyword arguments.
        latent: keywords that are merged last.
        place: where the partial stands in the config.
        check: looks at all arguments before each call; None where no argument matters.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        latent: dict[str, Any],
        place: CallPlace,
        check: Check | None = None,
    ) -> None:
        self.func, self.args, self.keywords = func, args, keywords
        self.latent, self._place, self._check = latent, place, check

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns what `func` returns for the arguments given here and earlier."""
        memo: dict[int, Any] = {}
        first = tuple(built(value, memo) for value in self.args)
        given = {key: kwargs[key] if key in kwargs else built(value, memo) for key, value in self.keywords.items()}
        last = {key: built(value, memo) for key, value in self.latent.items()}
        return call_checked(self.func, (*first, *args), {**given, **kwargs, **last}, self._place, self._check)

    @property
    def __signature__(self) -> inspect.Signature:
        try:
            return inspect.signature(functools.partial(self.func, *self.args, **{**self.keywords, **self.latent}))
        except (TypeError, ValueError):
            raise AttributeError("__signature__") from None

    def __repr__(self) -> str:
        given = [repr(value) for value in self.args]
        given += [f"{key}={value!r}" for key, value in {**self.keywords, **self.latent}.items()]
        return f"partial({', '.join([self._place.constructor, *given])})"


def given_keywords(given: Any, node: Call, path: GraphPath) -> dict[str, Any]:
    """Returns the keywords that `latent_args: !var name` of a call is given.

    Raises:
        GraphError: FG213, they are no mapping with texts as keys.
    """
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return dict(given)
    raise GraphError(
        f"{SPREAD!r} is given {given!r:.80}; it is a mapping of keyword arguments",
        code="FG213",
        span=(node.spread and node.spread.span) or node.span,
        path=format_path((*path, Key(SPREAD))),
        hint="give a mapping with texts as keys",
    )
