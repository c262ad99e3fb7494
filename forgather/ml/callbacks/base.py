"""The nouns of callbacks, which are those of transformers.

A callback written for `transformers.Trainer` is therefore a callback here, and the other way round.
`EVENTS` lists every event that the trainer sends, in the order in which a step meets them. One more is ours alone: a
callback that has a method `on_rewind` hears when a run went back to a checkpoint, and is given the state of that one.
"""

from __future__ import annotations

from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState

__all__ = ["EVENTS", "ExportableState", "TrainerCallback", "TrainerControl", "TrainerState"]

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_prediction_step",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
    "on_train_end",
)
