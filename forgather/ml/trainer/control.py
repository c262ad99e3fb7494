"""The shared state of a trainer's parts: arguments, trainer state, control flags, and the event dispatcher.

The functions set and clear the control flags by transformers' rules: what is due after a step, after an epoch, and what
a resumed run still has to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forgather.ml.callbacks.base import TrainerControl, TrainerState
from forgather.ml.callbacks.dispatch import CallbackDispatcher
from forgather.ml.trainer.arguments import TrainingArguments


@dataclass(slots=True)
class Session:
    """Arguments, state and control of a trainer, and the way to its callbacks.

    Args:
        args: settings.
        dispatcher: calls the callbacks, with the objects that they may use.
        state: progress of the run.
        control: flags that callbacks set.
    """

    args: TrainingArguments
    dispatcher: CallbackDispatcher
    state: TrainerState = field(default_factory=TrainerState)
    control: TrainerControl = field(default_factory=TrainerControl)

    def send(self, event: str, *, state: TrainerState | None = None, **details: Any) -> None:
        """Sends an event to the callbacks, and keeps the control that they return.

        Args:
            event: name of the event, such as "on_log".
            state: that callbacks get; the current one by default. A background save reports an earlier step.
            **details: further keyword arguments of the event.
        """
        self.control = self.dispatcher.send(
            event, self.args, self.state if state is None else state, self.control, **details
        )

    def log(self, values: dict[str, Any]) -> None:
        """Adds a line of metrics to the history and sends it to the callbacks."""
        line = {**values, "epoch": self.state.epoch}
        self.state.log_history.append({**line, "step": self.state.global_step})
        # Cleared before the event, as transformers does: a callback may set it again.
        self.control.should_log = False
        self.send("on_log", logs=line)


def begin_step(control: TrainerControl) -> None:
    """Clears the flags that were set for the previous step."""
    control.should_log = control.should_evaluate = control.should_save = False


def after_step(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Sets the flags that are due after an optimizer step.

    Args:
        args: intervals.
        state: after the step; its intervals are in steps.
        control: is changed.
    """
    step = state.global_step
    last = step >= state.max_steps
    # Intervals are read from the state: there a fraction of all steps has become a number of steps.
    evaluates = args.eval_strategy == "steps" and args.eval_delay <= step
    if args.logging_strategy == "steps" and step % state.logging_steps == 0:
        control.should_log = True
    if step == 1 and args.logging_first_step:
        control.should_log = True
    # Also at the last step: otherwise the final model would have no metric, and no checkpoint.
    if evaluates and (last or step % state.eval_steps == 0):
        control.should_evaluate = True
    if args.save_strategy == "steps" and (last or step % state.save_steps == 0):
        control.should_save = True
    if last:
        control.should_training_stop = True


def after_epoch(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Sets the flags that are due after an epoch.

    Args:
        args: strategies.
        state: after the epoch.
        control: is changed.
    """
    if args.logging_strategy == "epoch":
        control.should_log = True
    if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
        control.should_evaluate = True
    if args.save_strategy == "epoch":
        control.should_save = True


def is_evaluated(state: TrainerState) -> bool:
    """Returns whether the current step was evaluated.

    The work at the end of an epoch is done when an epoch was cut short at this step.
    """
    # `eval_runtime` is in every line of an evaluation; the name of the loss depends on the names of the sets.
    return any(line.get("step") == state.global_step and "eval_runtime" in line for line in state.log_history)


def pending_actions(control: TrainerControl) -> list[str]:
    """Returns the actions of this step that are left to the resumed run: an interrupted evaluation, and its save."""
    # A save alone is not pending: the checkpoint that stores this list is that save.
    return [name for name in ("should_evaluate", "should_save") if control.should_evaluate and getattr(control, name)]


def restore_pending(control: TrainerControl, names: Sequence[str]) -> None:
    """Sets the flags that `pending_actions` returned.

    Args:
        control: is changed.
        names: names of flags, from a checkpoint.
    """
    for name in names:
        setattr(control, name, True)
