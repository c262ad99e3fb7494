"""Sends events to callbacks.

Takes callbacks and what they may look at; gives, per event, the control they answered with. Keeps true:
callbacks are called in the order in which they were added; an event that no callback overrides costs
nothing; a callback's own exception passes through with a note that names the callback and the event.
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
        callbacks: callbacks, or classes of callbacks that need no arguments.
        scene: what every event passes by keyword (model, optimizer, ...); the trainer keeps it current.
    """

    def __init__(self, callbacks: Iterable[TrainerCallback | type[TrainerCallback]], scene: dict[str, Any]) -> None:
        self.callbacks: list[TrainerCallback] = []
        self.scene = scene
        self._listeners: dict[str, list[Callable[..., TrainerControl | None]]] = {}
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Appends a callback; a class is called without arguments first."""
        built = callback() if isinstance(callback, type) else callback
        missing = next((event for event in EVENTS if not callable(getattr(built, event, None))), None)
        if missing is not None:
            raise TrainingError(
                f"{type(built).__name__} is not a callback: it has no method {missing!r}",
                code="FG815",
                hint=_remedy(built),
            )
        self.callbacks.append(built)
        self._listeners.clear()

    def remove(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback:
        """Removes a callback, or the first one of a class, and returns it."""
        for position, present in enumerate(self.callbacks):
            if present is callback or (isinstance(callback, type) and isinstance(present, callback)):
                self._listeners.clear()
                return self.callbacks.pop(position)
        name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
        raise TrainingError(
            f"no callback {name!r} to remove",
            code="FG815",
            hint=nearest(name, [type(present).__name__ for present in self.callbacks]),
        )

    def send(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, **details: Any
    ) -> TrainerControl:
        """Calls every callback that listens to `event`; returns the control that is valid afterwards."""
        listeners = self._listeners.get(event)
        if listeners is None:
            listeners = self._listeners[event] = [
                getattr(callback, event) for callback in self.callbacks if _listens(callback, event)
            ]
        for listener in listeners:
            try:
                answer = listener(args, state, control, **self.scene, **details)
            except Exception as error:
                owner = type(getattr(listener, "__self__", listener)).__name__
                error.add_note(f"in the callback {owner}.{event}, step {state.global_step}")
                raise
            control = control if answer is None else answer
        return control


def _remedy(found: object) -> str:
    if isinstance(found, str):
        named = found if ":" in found else "callbacks.py:MyCallback"
        return f"a callback is an object, and this is the text {found[:60]!r}: write !singleton:{named[:60]}"
    if isinstance(found, functools.partial):
        return "a !partial is called later, and a callback is an object: write !singleton in its place"
    return "derive it from transformers.TrainerCallback, which answers every event"


def _listens(callback: TrainerCallback, event: str) -> bool:
    # Events of ours, which transformers does not know, are for those that have the method.
    method = getattr(callback, event, None)
    return getattr(method, "__func__", method) is not getattr(TrainerCallback, event, None)
