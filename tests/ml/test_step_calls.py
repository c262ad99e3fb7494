"""How many functions of Forgather a training step calls, in one process and with DDP.

Takes a training of a tiny model; gives the calls of a step. Keeps true: a step does little in Python beyond torch's own
calls, which `scripts/bench/python_per_step.py` measures as time. Time depends on the load of the machine; calls do not.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import default_collate

import forgather
import forgather.ml
from forgather.ml.callbacks.base import TrainerCallback
from tests.ml.distributed.gang import run_ranks

FIRST, STEPS = 4, 4
HOME = str(Path(forgather.__file__).parent) + os.sep


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x).squeeze(-1), labels)}


class Counter:
    """An optimizer factory that counts the calls from the update of one step to that of a later one."""

    def __init__(self):
        self.calls, self.updates = 0, 0

    def adamw(self, parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        optimizer.register_step_pre_hook(self._update)
        return optimizer

    def _update(self, *_):
        self.updates += 1
        sys.setprofile(self._add if FIRST <= self.updates < FIRST + STEPS else None)

    def _add(self, frame, event, argument):
        self.calls += event == "call" and frame.f_code.co_filename.startswith(HOME)


class Listener(TrainerCallback):
    """A callback that does something in three events of a step."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun = state.global_step

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.updated = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        self.ended = state.global_step


def calls_of_a_step(kind, folder, callbacks=()):
    counter = Counter()
    rows = [{"x": torch.ones(3), "labels": torch.zeros(())}] * 40
    settings = getattr(forgather.ml, kind.replace("Trainer", "TrainingArguments"))(
        output_dir=str(folder),
        max_steps=FIRST + STEPS + 1,
        per_device_train_batch_size=2,
        logging_strategy="no",
        save_strategy="no",
        use_cpu=True,
    )
    getattr(forgather.ml, kind)(
        model_init=Model,
        args=settings,
        train_dataset=rows,
        data_collator=default_collate,
        optimizer_factory=counter.adamw,
        callbacks=list(callbacks),
    ).train()
    assert counter.updates == FIRST + STEPS + 1
    return counter.calls / STEPS


def test_a_step_calls_few_functions(tmp_path):
    without, with_listener = (calls_of_a_step("Trainer", tmp_path, callbacks) for callbacks in ((), [Listener()]))
    assert 100 < without <= 145
    # Each event that has a listener is sent; the listener itself is not of Forgather.
    assert without + 3 <= with_listener


def test_a_step_with_ddp_calls_few_functions(tmp_path):
    for calls in run_ranks(2, calls_of_a_step, "AccelTrainer", tmp_path):
        assert 100 < calls <= 165
