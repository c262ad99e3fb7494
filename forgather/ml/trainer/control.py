"""What the parts of a trainer share: arguments, state, control, and the way to the callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forgather.ml.callbacks.base import TrainerControl, TrainerState
from forgather.ml.callbacks.dispatch import CallbackDispatcher
from forgather.ml.trainer.arguments import TrainingArguments


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


def begin_step(control: TrainerControl) -> None:
    """Clears what was asked for during the last step."""
    control.should_log = control.should_evaluate = control.should_save = False


def after_step(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Sets the switches that are due after an update."""
    step = state.global_step
    last = step >= state.max_steps
    evaluates = args.eval_strategy == "steps" and args.eval_delay <= step
    if args.logging_strategy == "steps" and step % state.logging_steps == 0:
        control.should_log = True
    if step == 1 and args.logging_first_step:
        control.should_log = True
    if evaluates and (last or step % state.eval_steps == 0):
        control.should_evaluate = True
    if args.save_strategy == "steps" and (last or step % state.save_steps == 0):
        control.should_save = True
    if last:
        control.should_training_stop = True


def after_epoch(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Sets the switches that are due after an epoch."""
    if args.logging_strategy == "epoch":
        control.should_log = True
    if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
        control.should_evaluate = True
    if args.save_strategy == "epoch":
        control.should_save = True


def is_evaluated(state: TrainerState) -> bool:
    """Tells whether the present step was: where it cut an epoch short, what the end of an epoch asks for is done."""
    return any(line.get("step") == state.global_step and "eval_runtime" in line for line in state.log_history)


def pending_actions(control: TrainerControl) -> list[str]:
    """Returns what a run that goes on from here begins with: an evaluation that was broken off, and its save."""
    return [name for name in ("should_evaluate", "should_save") if control.should_evaluate and getattr(control, name)]


def restore_pending(control: TrainerControl, names: Sequence[str]) -> None:
    """Sets the switches that `pending_actions` returned."""
    for name in names:
        setattr(control, name, True)
