"""What log lines tell about time: waiting for rows, and how far the host is ahead of the device."""

import time

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import forgather.ml
from forgather.ml.host_reads import reads_forbidden
from forgather.ml.trainer.meter import Meter
from forgather.ml.types import Update, Window
from tests.ml.distributed.bench import make_model, packed_rows

ROW_SECONDS, STEPS, ROWS = 0.02, 6, 2


class Rows(torch.utils.data.Dataset):
    """Rows each of which takes a time, and the sum of these times, measured apart."""

    def __init__(self, seconds):
        self.rows = packed_rows(1, 6)
        self.seconds = seconds
        self.taken = 0.0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        began = time.perf_counter()
        if self.seconds:
            time.sleep(self.seconds)
        self.taken += time.perf_counter() - began
        return self.rows[number]


class _Start(TrainerCallback):
    """Forgets the times before the first step: the start reads rows, too."""

    def __init__(self, rows):
        self.rows = rows

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.rows.taken = 0.0


def lines(folder, rows, eval_rows=None, **settings):
    return [line for line in history(folder, rows, eval_rows, **settings) if "loss" in line]


def history(folder, rows, eval_rows=None, **settings):
    args = forgather.ml.TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=STEPS,
        logging_steps=STEPS,
        per_device_train_batch_size=ROWS,
        **{"save_strategy": "no", **settings},
    )
    trainer = forgather.ml.Trainer(
        model_init=lambda: make_model("llama", torch.float32, 1),
        args=args,
        train_dataset=rows,
        eval_dataset=eval_rows,
        callbacks=[_Start(rows)],
    )
    trainer.train()
    return trainer.state.log_history


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_time_of_slow_rows_is_the_time_of_waiting(accumulation, tmp_path):
    rows = Rows(ROW_SECONDS)
    (line,) = lines(tmp_path, rows, gradient_accumulation_steps=accumulation)
    waited = line["data_wait_share"] * STEPS / line["steps_per_second"]
    assert rows.taken >= ROW_SECONDS * STEPS * ROWS * accumulation
    assert rows.taken == pytest.approx(waited, rel=0.1)


def test_rows_that_are_there_are_not_waited_for(tmp_path):
    (line,) = lines(tmp_path, Rows(0))
    assert 0.3 > line["data_wait_share"] >= 0
    assert "host_ahead_seconds" not in line


def test_evaluations_and_saves_are_not_part_of_rates_and_shares(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    slow = Rows(ROW_SECONDS)
    found = history(tmp_path, Rows(0), slow, logging_first_step=True, **settings)
    evaluations = [line["eval_runtime"] for line in found if "eval_runtime" in line]
    training = [line for line in found if "loss" in line]
    (summary,) = [line for line in found if "train_runtime" in line]
    # Of six steps, the second line has five, and two evaluations between them.
    seconds = [steps / line["steps_per_second"] for steps, line in zip((1, STEPS - 1), training, strict=True)]
    assert len(evaluations) == 3 and min(evaluations) >= ROW_SECONDS * len(slow)
    assert sum(seconds) + sum(evaluations) <= summary["train_runtime"]
    for line in training:
        assert line["tokens_per_second"] / line["steps_per_second"] == pytest.approx(ROWS * 12)
    assert training[1]["data_wait_share"] * seconds[1] < ROW_SECONDS * len(slow)


class _Late(Tensor):
    """A loss of which the device needs a time."""

    def __float__(self):
        time.sleep(0.05)
        return super().__float__()


def test_the_host_is_ahead_by_the_time_that_the_line_waits_for_the_device():
    with reads_forbidden():
        meter = Meter(torch.device("cpu"))
        meter.start()
        late = torch.ones(()).as_subclass(_Late)
        window = Window([], num_valid=1, num_tokens=1, num_rows=1)
        meter.add(late, Update(), window, learning_rate=0.1)
        ahead = meter.line()["host_ahead_seconds"]
        meter.add(1.0, Update(), window, learning_rate=0.1)
        level = meter.line()["host_ahead_seconds"]
    assert 0.05 <= ahead < 1
    assert level < 0.02
