"""Jinja's runtime types with records of template lines: undefined values, namespaces, `super()`, context.

The input is the arguments of Jinja's own types; the output is objects that also record template lines. Invariant: in a
template, each object behaves like one of Jinja's own type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from jinja2.runtime import BlockReference, Context, StrictUndefined, Undefined
from jinja2.utils import Namespace

from forgather.config._jinja import origins
from forgather.config._jinja.origins import Place


class PlacedMessage(str):
    """The message of an undefined value, with the template and the line that read it."""

    __slots__ = ("template", "line")

    template: Any
    line: int


class UndefinedValue(StrictUndefined):
    """The value of a name or attribute that does not exist; it records the line that read it."""

    __slots__ = ("_fg_code_line", "_fg_template")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The value is created in the frame of the template; by the time it is used, that frame may be gone.
        frame: FrameType | None = sys._getframe(1)
        self._fg_template = frame.f_globals.get("__jinja_template__") if frame else None
        # A missing macro argument is created inside the macro; the line to report is the call.
        if args and args[0] and "was not provided" in args[0]:
            frame = _caller(frame)
            self._fg_template = frame.f_globals["__jinja_template__"] if frame else None
        self._fg_code_line = frame.f_lineno if frame else 0

    def __repr__(self) -> str:
        """Raises the error for an undefined value; otherwise a list would print an undefined item as "Undefined"."""
        return str(self)

    def __fspath__(self) -> str:
        """Raises the error for an undefined value, where a path is expected."""
        return str(self)

    @property
    def _undefined_message(self) -> str:
        message = super()._undefined_message
        if self._fg_template is None:
            return message
        placed = PlacedMessage(message)
        placed.template = self._fg_template
        placed.line = placed.template.get_corresponding_lineno(self._fg_code_line)
        return placed


class TracedNamespace(Namespace):
    """The object of `namespace()`, which records the line that set each attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_fg_sets"] = {}

    def __getattribute__(self, name: str) -> Any:
        # Jinja's namespace looks up every other attribute among those that the template has set.
        if name in ("__class__", "_Namespace__attrs", "_fg_sets", "__dict__"):
            return object.__getattribute__(self, name)
        return super().__getattribute__(name)


class SuperReference(BlockReference):
    """The object behind `super()`; the line that prints its text is not added to the origins of the text."""

    @property
    def super(self) -> BlockReference | Undefined:
        """The block of the next parent, for `super.super()`."""
        outer = super().super
        if isinstance(outer, BlockReference):
            return SuperReference(self.name, self._context, self._stack, self._depth + 1)
        return outer

    def __call__(self) -> str:
        environment: Any = self._context.environment
        return origins.through_super(environment.concat(self._stack[self._depth](self._context)))


class RunContext(Context):
    """Jinja's context, which also has the line of the last executed `set` of each name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fg_sets: dict[str, tuple[Place, ...]] = {}

    def super(self, name: str, current: Callable[[Context], Any]) -> BlockReference | Undefined:
        """Returns the block of the parent, or an undefined value if no parent has it."""
        found = super().super(name, current)
        if isinstance(found, BlockReference):
            return SuperReference(name, self, found._stack, found._depth)
        return found

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """Returns a context with further local variables and the same records of `set` lines."""
        made = super().derived(locals)
        # Shared, not copied: a loop body assigns in the same scope.
        made.fg_sets = self.fg_sets  # type: ignore[attr-defined]
        return made


def _caller(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the template code that called the macro running in `frame`."""
    frame = frame.f_back if frame else None
    while frame is not None and "__jinja_template__" not in frame.f_globals:
        frame = frame.f_back
    return frame


def note_field(space: Any, field: str, place: tuple[Place, ...]) -> None:
    """Records the line that set an attribute of a namespace; does nothing if `space` is another object."""
    if type(space) is TracedNamespace:
        space._fg_sets[field] = place
