"""The objects of `!partial`, and the recipes of values that each of their calls builds again.

A recipe describes a value that each call of a partial builds again. The inputs are built arguments and recipes; the
output is a callable. Invariants: values that all calls of a partial share are built once, when the partial is built; a
recipe contains no node and no construction, so a partial can be pickled if its arguments can.
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
    """The place of a call in the config, which is noted on an exception that the call raises."""

    constructor: str
    path: str
    span: Span | None


def call_noted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], place: CallPlace) -> Any:
    """Returns `function(*args, **kwargs)`; an exception gets a `BuildNote`, unless an inner call has added one.

    Args:
        function: the constructor.
        args: the positional arguments.
        kwargs: the keyword arguments.
        place: the place of the call in the config, which the `BuildNote` names.
    """
    try:
        return function(*args, **kwargs)
    # A constructor may call sys.exit(); the user should still see which one.
    except (Exception, SystemExit) as error:
        note_once(error, BuildNote(place.constructor, place.path, place.span))
        raise


Check = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], None]
"""Raises a `ResolveError` if a function must not be called with these arguments."""


def call_checked(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    place: CallPlace,
    check: Check | None,
) -> Any:
    """Returns `function(*args, **kwargs)`, after `check` has allowed all arguments, also those given at the call.

    Args:
        function: the constructor.
        args: the positional arguments.
        kwargs: the keyword arguments.
        place: the place of the call in the config.
        check: a function that raises an error if an argument is not allowed; None to allow all arguments.

    Raises:
        ResolveError: if an argument is not allowed.
    """
    if check is not None:
        try:
            check(function, args, kwargs)
        except ResolveError as error:
            # The guard does not know where in the config the partial is written.
            error.span, error.path = error.span or place.span, error.path or place.path
            raise
    return call_noted(function, args, kwargs, place)


def note_once(error: BaseException, note: BuildNote) -> None:
    """Adds `note` to an exception that has no `BuildNote` yet."""
    # Calls nest, and only the innermost place is the cause.
    if not any(isinstance(old, BuildNote) for old in getattr(error, "__notes__", ())):
        error.add_note(note)


class Recipe(ABC):
    """The description of a value that each call of a partial builds again."""

    __slots__ = ()

    @abstractmethod
    def build(self, memo: dict[int, Any]) -> Any:
        """Returns a new value.

        Args:
            memo: the shared values that the current call of the partial has already built, by the id of their recipe.
        """


def built(value: Any, memo: dict[int, Any]) -> Any:
    """Returns the value that a recipe builds; an argument that is not a recipe is returned as it is."""
    # Most arguments are plain values that were built once.
    return value.build(memo) if isinstance(value, Recipe) else value


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FreshCall(Recipe):
    """A call of a factory inside a partial; each call of the partial makes it again, at every occurrence."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    latent: Mapping[str, Any]
    place: CallPlace
    check: Check | None = None

    def __repr__(self) -> str:
        return f"<{self.place.constructor} per call>"

    def build(self, memo: dict[int, Any]) -> Any:
        """Returns the result of the function, which is called with newly built arguments."""
        args = tuple(built(value, memo) for value in self.args)
        # Latent keywords last: they are built last and override the others.
        kwargs = {key: built(value, memo) for key, value in (*self.kwargs.items(), *self.latent.items())}
        return call_checked(self.function, args, kwargs, self.place, self.check)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FreshContainer(Recipe):
    """A container with a factory inside.

    Each call of the partial builds the container once if it is shared, and otherwise at every occurrence.
    """

    kind: ContainerKind
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    shared: bool

    def __repr__(self) -> str:
        return f"<{assemble(self.kind, self.keys, self.values)!r} per call>"

    def build(self, memo: dict[int, Any]) -> Any:
        """Returns a new container, or the one in `memo` if the container is shared and was built in the same call."""
        if self.shared and id(self) in memo:
            return memo[id(self)]
        container = assemble(self.kind, self.keys, tuple(built(value, memo) for value in self.values))
        if self.shared:
            memo[id(self)] = container
        return container


def assemble(kind: ContainerKind, keys: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
    """Returns the Python container of a kind.

    Args:
        kind: the kind of the container.
        keys: the keys of a `DICT`; they are ignored for other kinds.
        values: the items of the container, or the values of a `DICT`.
    """
    if kind is ContainerKind.DICT:
        return dict(zip(keys, values, strict=True))
    # A `!dlist` is a list in Python; its keys are for overriding in the config only.
    return values if kind is ContainerKind.TUPLE else list(values)


class PartialObject:
    """The object of a `!partial`: a callable with some arguments given.

    The positional arguments of a call are appended to those of the partial, and the keyword arguments of a call
    override those of the partial. `keywords` and `args` contain a `Recipe` for each value that every call builds again.

    Args:
        func: the constructor.
        args: the first positional arguments.
        keywords: the keyword arguments.
        latent: the keyword arguments that override all others.
        place: the place of the partial in the config.
        check: a function that raises an error if an argument of a call is not allowed; None to allow all arguments.
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
        """Returns the result of `func` for the arguments of the partial and of the call."""
        # One memo per call: a shared container is one object within a call, and a new one in the next.
        memo: dict[int, Any] = {}
        first = tuple(built(value, memo) for value in self.args)
        # A factory whose keyword is overridden by the call is not called.
        given = {key: kwargs[key] if key in kwargs else built(value, memo) for key, value in self.keywords.items()}
        # After all others, also after those of the call.
        last = {key: built(value, memo) for key, value in self.latent.items()}
        return call_checked(self.func, (*first, *args), {**given, **kwargs, **last}, self._place, self._check)

    @property
    def __signature__(self) -> inspect.Signature:
        try:
            return inspect.signature(functools.partial(self.func, *self.args, **{**self.keywords, **self.latent}))
        except (TypeError, ValueError):
            # inspect.signature() then reports that there is none, instead of failing inside of a property.
            raise AttributeError("__signature__") from None

    def __repr__(self) -> str:
        given = [repr(value) for value in self.args]
        given += [f"{key}={value!r}" for key, value in {**self.keywords, **self.latent}.items()]
        return f"partial({', '.join([self._place.constructor, *given])})"


def given_keywords(given: Any, node: Call, path: GraphPath) -> dict[str, Any]:
    """Returns the keywords of `latent_args: !var name`.

    Args:
        given: the value of the variable.
        node: the node of the call.
        path: the path of the call, for the error.

    Raises:
        GraphError: FG213 if the value is not a mapping with strings as keys.
    """
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return dict(given)
    raise GraphError(
        f"{SPREAD!r} is given {given!r:.80}; it must be a mapping of keyword arguments",
        code="FG213",
        span=(node.spread and node.spread.span) or node.span,
        path=format_path((*path, Key(SPREAD))),
        hint="give a mapping with strings as keys",
    )
