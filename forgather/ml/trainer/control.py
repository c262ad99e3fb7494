"""The shared state of a trainer's parts: arguments, trainer state, control flags, and the event dispatcher.

The functions of this module set and clear the control flags by the rules of transformers: after each optimizer step,
after each epoch, and for the actions that a resumed run still has to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from forgather.ml.callbacks.base import TrainerControl, TrainerState
from forgather.ml.callbacks.dispatch import CallbackDispatcher
from forgather.ml.callbacks.output_target import run_folder
from forgather.ml.tracking import Logged, receiving
from forgather.ml.trainer.arguments import TrainingArguments


@dataclass(slots=True)
class Session:
    """The arguments, the state and the control flags of a trainer, and the dispatcher of events to its callbacks.

    Args:
        args: the training arguments.
        dispatcher: the dispatcher, which calls the callbacks and passes them the model, the optimizer and similar
            objects.
        state: the trainer state, which records the progress of the run.
        control: the control flags, which callbacks can set.
    """

    args: TrainingArguments
    dispatcher: CallbackDispatcher
    state: TrainerState = field(default_factory=TrainerState)
    control: TrainerControl = field(default_factory=TrainerControl)

    def send(self, event: str, *, state: TrainerState | None = None, **details: Any) -> None:
        """Sends an event to the callbacks, and stores the control flags that they return.

        Args:
            event: the name of the event, such as "on_log".
            state: the trainer state that callbacks get, the current one by default. A background save passes the state
                of an earlier step.
            **details: the further keyword arguments of the event.
        """
        # Most events of a step have no listener.
        if self.dispatcher.listeners(event):
            self.control = self.dispatcher.send(
                event, self.args, self.state if state is None else state, self.control, **details
            )

    def log(self, values: dict[str, Any]) -> None:
        """Appends a line of metrics to the log history, and sends the line to the callbacks."""
        line = {**values, "epoch": self.state.epoch}
        self.state.log_history.append({**line, "step": self.state.global_step})
        # Cleared before the event, as transformers does: a callback may set it again.
        self.control.should_log = False
        self.send("on_log", logs=line)

    def receiving(self) -> AbstractContextManager[None]:
        """Returns a context manager in which the user's code can log to the callbacks, see `forgather.ml.tracking`."""

        def send(logged: Logged) -> None:
            self.send("on_logged", logged=logged)

        is_main = int(self.args.process_index) == 0
        return receiving(lambda: self.state.global_step, run_folder(self.args), send if is_main else None)

    def report(self, event: Mapping[str, Any]) -> None:
        """Sends something that happened at a step, such as an anomaly, to the callbacks as `on_run_event`.

        Args:
            event: the facts, with `event` (what kind of thing happened) and `step`.
        """
        self.send("on_run_event", run_event=event)


def begin_step(control: TrainerControl) -> None:
    """Clears the flags that were set for the previous step."""
    control.should_log = control.should_evaluate = control.should_save = False


def after_step(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Sets the control flags for the actions that are due after an optimizer step.

    Args:
        args: the training arguments, whose strategies for logging, evaluating and saving are read.
        state: the trainer state after the step, whose intervals (in steps) are read.
        control: the control flags, which are changed.
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
    """Sets the control flags for the actions that are due after an epoch.

    Args:
        args: the training arguments, whose strategies for logging, evaluating and saving are read.
        state: the trainer state after the epoch.
        control: the control flags, which are changed.
    """
    if args.logging_strategy == "epoch":
        control.should_log = True
    if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
        control.should_evaluate = True
    if args.save_strategy == "epoch":
        control.should_save = True


def is_evaluated(state: TrainerState) -> bool:
    """Returns whether the log history contains an evaluation of the current step."""
    # `eval_runtime` is in every line of an evaluation; the name of the loss depends on the names of the sets.
    return any(line.get("step") == state.global_step and "eval_runtime" in line for line in state.log_history)


def pending_actions(control: TrainerControl) -> list[str]:
    """Returns the names of the flags that a resumed run must set again.

    These are the flags of an evaluation that was interrupted, and of the save that was due after it.
    """
    # A save alone is not pending: the checkpoint that stores this list is that save.
    return [name for name in ("should_evaluate", "should_save") if control.should_evaluate and getattr(control, name)]


def restore_pending(control: TrainerControl, names: Sequence[str]) -> None:
    """Sets the control flags whose names `pending_actions` returned.

    Args:
        control: the control flags, which are changed.
        names: the names of the flags to set, as a checkpoint stores them.
    """
    for name in names:
        setattr(control, name, True)
