"""Resuming where runs are easily lost: at the end of an epoch, in a stream, with another config, from another folder."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.checkpoint import checkpoint_folder, list_checkpoints
from tests.ml.fixtures import (
    Noisy,
    Recorder,
    Regression,
    assert_same_weights,
    regression_rows,
    rows,
    tiny_llama,
    weights,
)


class At(TrainerCallback):
    """Asks for something at the end of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action(control)


def interrupt(control):
    os.kill(os.getpid(), signal.SIGINT)


def stop(control):
    control.should_training_stop = True


def trained(settings, *callbacks, data=None, model=None, **given):
    args = settings(**{"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 100, **given})
    parts = {"train_dataset": data or rows(), "eval_dataset": rows(4, seed=5), "callbacks": callbacks}
    return Trainer(model or tiny_llama(attention_dropout=0.1), args, **parts)


def test_a_run_stopped_between_the_last_step_of_an_epoch_and_its_end_does_not_lose_the_end(settings):
    job = {"eval_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau", "logging_strategy": "epoch"}
    job |= {"lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0, "factor": 0.25}}
    whole = trained(settings, **job)
    whole.train()
    shutil.rmtree(whole.args.output_dir)
    with pytest.raises(KeyboardInterrupt):
        trained(settings, At(4, interrupt), **job).train()
    recorder = Recorder()
    resumed = trained(settings, recorder, **job)
    resumed.train("auto")
    assert ("on_epoch_end", 4) in recorder.events
    assert_same_weights(weights(whole.model), weights(resumed.model))
    for name in ("loss", "eval_loss"):
        lines = [[(line["step"], line[name]) for line in t.state.log_history if name in line] for t in (whole, resumed)]
        assert [4, 8, 12] == [step for step, _ in lines[0]]
        assert lines[0] == lines[1]


def test_a_stream_of_random_rows_goes_on_with_the_numbers_it_would_have_drawn(settings):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            noisy = Noisy()
            return (noisy[number] for number in range(len(noisy)))

    job = {"max_steps": 7, "save_steps": 1}
    whole = trained(settings, data=Stream(), **job)
    whole.train()
    shutil.rmtree(whole.args.output_dir)
    trained(settings, At(2, stop), data=Stream(), **job).train()
    resumed = trained(settings, data=Stream(), **job)
    resumed.train("auto")
    assert_same_weights(weights(whole.model), weights(resumed.model))


def test_settings_that_lose_against_the_checkpoint_are_said(settings, caplog):
    trained(settings, weight_decay=0.1).train()
    folder = str(checkpoint_folder(Path(settings().output_dir), 12))
    trained(settings, weight_decay=0.1).train(folder)
    assert "settings of the checkpoint" not in caplog.text
    other = trained(settings, weight_decay=0.2, learning_rate=0.5)
    other.train(folder)
    assert (
        "resuming with the settings of the checkpoint: "
        "weight_decay 0.1 in parameter group 0 (the config says 0.2), lr 0.01 (the config says 0.5)"
    ) in caplog.text


def test_an_optimizer_or_schedule_of_another_class_is_refused(settings):
    trained(settings).train()
    folder = str(checkpoint_folder(Path(settings().output_dir), 12))
    with pytest.raises(CheckpointError, match=r"FG605.*schedule state does not fit StepLR: it was written by LambdaLR"):
        args = settings(save_strategy="steps")
        schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)  # noqa: E731
        Trainer(tiny_llama(), args, train_dataset=rows(), lr_scheduler_factory=schedule).train(folder)
    with pytest.raises(CheckpointError, match=r"FG605.*optimizer state does not fit SGD: it was written by AdamW"):
        trained(settings, optim="sgd").train(folder)


class Scripted(Regression):
    """Says in evaluation what it is told to say."""

    def __init__(self, *losses):
        super().__init__()
        self.losses = list(losses)

    def forward(self, x, y):
        return super().forward(x, y) if self.training else torch.tensor(self.losses.pop(0))


def scripted(settings, losses, *callbacks, **given):
    args = settings(**{"load_best_model_at_end": True, "per_device_eval_batch_size": 8, **given})
    data = {"train_dataset": regression_rows(), "eval_dataset": regression_rows()}
    return Trainer(Scripted(*losses), args, callbacks=callbacks, **data)


def best(trainer):
    return Path(trainer.state.best_model_checkpoint).name


def test_the_best_of_the_saved_models_is_loaded_where_a_better_one_was_not_saved(settings):
    job = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    trainer = scripted(settings, [1.0, 5.0, 9.0, 3.0, 9.0, 4.0, 9.0, 6.0], **job, save_total_limit=1)
    trainer.train()
    assert (1.0, 1, "checkpoint-4") == (trainer.state.best_metric, trainer.state.best_global_step, best(trainer))
    assert [4, 8] == [step for step, _ in list_checkpoints(Path(trainer.args.output_dir))]
    written = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    assert_same_weights(written, weights(trainer.model))


def test_a_checkpoint_written_before_its_evaluation_can_be_the_best(settings):
    def save(control):
        control.should_save = True

    job = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2}
    trainer = scripted(settings, [1.0, 2.0], At(4, save), **job)
    trainer.train()
    assert "checkpoint-4" == best(trainer)


def test_a_run_that_goes_on_in_another_folder_keeps_the_best_model_and_saves_its_own(settings, tmp_path):
    job = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2}
    first = scripted(settings, [1.0, 2.0], **job)
    first.train()
    resume_from = str(checkpoint_folder(Path(first.args.output_dir), 8))
    other = scripted(settings, [3.0], **{**job, "num_train_epochs": 3, "output_dir": str(tmp_path / "other")})
    other.train(resume_from)
    assert str(checkpoint_folder(Path(first.args.output_dir), 4)) == other.state.best_model_checkpoint
    assert [12] == [step for step, _ in list_checkpoints(tmp_path / "other")]


def test_a_best_checkpoint_that_is_gone_is_said_and_another_one_takes_its_place(settings, caplog):
    job = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    first = scripted(settings, [1.0, 2.0], num_train_epochs=2, **job)
    first.train()
    shutil.rmtree(first.state.best_model_checkpoint)
    other = scripted(settings, [3.0], num_train_epochs=3, **job)
    other.train("auto")
    assert "the best checkpoint so far" in caplog.text
    assert "checkpoint-12" == best(other)


def test_a_step_that_was_saved_in_one_folder_is_saved_in_another_one_too(settings, tmp_path):
    trained(settings).train()
    resume_from = str(checkpoint_folder(Path(settings().output_dir), 12))

    class AskAtEnd(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_save = True

    trained(settings, AskAtEnd(), output_dir=str(tmp_path / "other")).train(resume_from)
    assert [12] == [step for step, _ in list_checkpoints(tmp_path / "other")]


def test_a_folder_with_checkpoints_of_an_earlier_run_is_mentioned(settings, caplog):
    trained(settings, save_steps=5).train()
    assert "of an earlier run" not in caplog.text
    trained(settings, num_train_epochs=1).train()
    assert "holds 3 checkpoints of an earlier run, up to step 12" in caplog.text


def test_extra_state_of_a_module_is_saved_and_comes_back(settings, tmp_path):
    class Counting(Regression):
        seen = 0

        def forward(self, x, y):
            self.seen += len(x)
            return super().forward(x, y)

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    args = settings(save_strategy="epoch")
    Trainer(Counting(), args, train_dataset=regression_rows()).train()
    fresh = Trainer(Counting(), args, train_dataset=regression_rows())
    fresh.train("auto")
    assert 8 == fresh.model.seen
    assert {"model.safetensors", "model_extra_state.json"} <= {file.name for file in Path(args.output_dir).iterdir()}
