"""Callback base classes, re-exported from transformers, and the list of events.

A callback that was written for `transformers.Trainer` works with forgather's trainers without changes, and vice versa.
`EVENTS` lists the events in the order in which training sends them. Forgather's trainers send further events to
the callbacks that have a method of that name:

* `on_rewind`: the run has been rewound to a checkpoint; the callback is called with the restored state.
* `on_step_record`, with `record` (a `StepRecord`) and `report`: the measurements of an optimizer step are known. On an
  accelerator this is up to a few steps later. What a callback passes to `report`, a mapping with `event` and `step`,
  is sent to all callbacks as `on_run_event`.
* `on_run_event`, with `run_event`, such a mapping: something happened at a step of the run. `JsonLogger` records it.
* `on_logged`, with `logged` (a `Logged`): the user's code has logged something with `forgather.ml.tracking`.
* `on_control`, with `facts` and `done`: the run has done what the user asked of it while it goes on.
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
