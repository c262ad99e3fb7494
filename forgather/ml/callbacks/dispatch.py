"""Callback dispatch: sends the events of a trainer to its callbacks.

The inputs are callbacks and the keyword arguments of the events; the output is the `TrainerControl` after each event.
Callbacks are called in the order in which they were added. An event that no callback overrides costs one dictionary
lookup. If a callback raises an exception, the exception gets a note with the names of the callback and the event.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from forgather.errors import TrainingError, nearest
from forgather.ml.callbacks.base import EVENTS, TrainerCallback, TrainerControl, TrainerState


class CallbackDispatcher:
    """The callbacks of one trainer.

    Args:
        callbacks: the callbacks. A callback class, which must need no arguments, is instantiated.
        scene: the keyword arguments of every event (model, optimizer, ...). The trainer updates this dict.
    """

    def __init__(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback]], scene: dict[str, Any]) -> None:
        self.callbacks: list[TrainerCallback] = []
        self.scene = scene
        self._listeners: dict[str, list[Callable[..., TrainerControl | None]]] = {}
        self.has_foreign = False
        """Whether some callbacks are neither of Forgather nor of transformers."""
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Appends a callback; a class is instantiated without arguments.

        Raises:
            TrainingError: FG815 if the object does not have the methods of a callback.
        """
        built = callback() if isinstance(callback, type) else callback
        # Checked when it is added: otherwise a missing method would be found only when its event is sent.
        missing = next((event for event in EVENTS if not callable(getattr(built, event, None))), None)
        if missing is not None:
            raise TrainingError(
                f"{type(built).__name__} is not a callback: it has no method {missing!r}",
                code="FG815",
                hint=_remedy(built),
            )
        self.callbacks.append(built)
        self._callbacks_changed()

    def remove(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback:
        """Removes and returns a callback, or the first callback of a class.

        Raises:
            TrainingError: FG815 if there is no such callback.
        """
        for position, present in enumerate(self.callbacks):
            if present is callback or (isinstance(callback, type) and isinstance(present, callback)):
                removed = self.callbacks.pop(position)
                self._callbacks_changed()
                return removed
        name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
        raise TrainingError(
            f"no callback {name!r} to remove",
            code="FG815",
            hint=nearest(name, [type(present).__name__ for present in self.callbacks]),
        )

    def _callbacks_changed(self) -> None:
        self._listeners.clear()
        owners = {type(one).__module__.partition(".")[0] for one in self.callbacks}
        self.has_foreign = not owners <= {"forgather", "transformers"}

    def listeners(self, event: str) -> list[Callable[..., TrainerControl | None]]:
        """Returns the methods of the callbacks that override an event."""
        # Cached per event: events of every micro-batch would otherwise look up a method of each callback.
        found = self._listeners.get(event)
        if found is None:
            found = self._listeners[event] = [
                getattr(callback, event) for callback in self.callbacks if _listens(callback, event)
            ]
        return found

    def send(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, **details: Any
    ) -> TrainerControl:
        """Calls the callbacks that override an event and returns the resulting control.

        Args:
            event: the name of the method, for example "on_log".
            args: the training arguments.
            state: the state of the trainer.
            control: the control that is passed to the first callback. If a callback returns a control, the callbacks
                after it get that one.
            **details: the further keyword arguments of the event.
        """
        for listener in self.listeners(event):
            try:
                answer = listener(args, state, control, **self.scene, **details)
            except Exception as error:
                owner = type(getattr(listener, "__self__", listener)).__name__
                # The exception itself is raised unchanged, so that its type can be caught.
                error.add_note(f"in the callback {owner}.{event}, step {state.global_step}")
                raise
            control = control if answer is None else answer
        return control


def _remedy(found: object) -> str:
    # A config can name a callback without its tag; the text then arrives here as it is.
    if isinstance(found, str):
        named = found if ":" in found else "callbacks.py:MyCallback"
        return f"a callback is an object, and this is the text {found[:60]!r}: write !singleton:{named[:60]}"
    if isinstance(found, functools.partial):
        return "a !partial is called later, and a callback is an object: write !singleton in its place"
    return "derive it from transformers.TrainerCallback, which answers every event"


def _listens(callback: TrainerCallback, event: str) -> bool:
    # transformers' base class has no `on_rewind`, so for that event any callback with the method is a listener.
    method = getattr(callback, event, None)
    return getattr(method, "__func__", method) is not getattr(TrainerCallback, event, None)
