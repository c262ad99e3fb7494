"""What the parts of a trainer share: arguments, state, control, and the way to the callbacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forgather.ml.callbacks.base import TrainerControl, TrainerState
from forgather.ml.callbacks.dispatch import CallbackDispatcher
from forgather.ml.trainer.args import TrainingArguments


@dataclass(slots=True)
class Session:
    """The present moment of a trainer.

    Args:
        args: settings.
        dispatcher: callbacks, and what they may look at.
        state: where the run is.
        control: what callbacks asked for.
    """

    args: TrainingArguments
    dispatcher: CallbackDispatcher
    state: TrainerState = field(default_factory=TrainerState)
    control: TrainerControl = field(default_factory=TrainerControl)

    def send(self, event: str, *, of: TrainerState | None = None, **details: Any) -> None:
        """Sends an event; keeps the control that callbacks answered with.

        Args:
            event: its name.
            of: the state at the step that it tells of; the present one by default.
            **details: what else callbacks are told.
        """
        self.control = self.dispatcher.send(event, self.args, self.state if of is None else of, self.control, **details)

    def log(self, values: dict[str, Any]) -> None:
        """Adds a line to the history and sends it to the callbacks."""
        line = {**values, "epoch": self.state.epoch}
        self.state.log_history.append({**line, "step": self.state.global_step})
        self.control.should_log = False
        self.send("on_log", logs=line)
