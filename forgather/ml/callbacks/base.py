"""Callback base classes, re-exported from transformers, and the list of events.

A callback that was written for `transformers.Trainer` works with forgather's trainers without changes, and vice versa.
`EVENTS` lists the events in the order in which training sends them. There are two further events: a callback with a
method `on_rewind` is called with the restored state after a run has been rewound to a checkpoint, and one with a method
`on_control` with `facts` and `done` after the run has done what the user asked of it while it goes on.
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
