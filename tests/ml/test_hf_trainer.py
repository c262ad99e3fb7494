"""`transformers.Trainer` driven by a config: what the arguments ask for happens, and a stop loses nothing."""

import os
import signal
import warnings

import pytest
import torch
from transformers import TrainingArguments

from forgather.errors import CheckpointError
from forgather.ml.callbacks import RunSummaryCallback, TrainerCallback
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.fixtures import Recorder, assert_same_weights, rows, tiny_llama, weights


class At(TrainerCallback):
    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def make(folder, *callbacks, **given):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "report_to": "none", "use_cpu": True}
    args = TrainingArguments(str(folder), per_device_train_batch_size=2, disable_tqdm=True, **(settings | given))
    return HFTrainer(tiny_llama(), args, train_dataset=rows(), callbacks=[Recorder(), *callbacks])


@pytest.mark.parametrize("request_", ["auto", True, "folder"])
def test_the_checkpoint_that_the_arguments_name_is_resumed_from_and_named(tmp_path, request_, caplog):
    whole = make(tmp_path)
    whole.train()
    request_ = str(tmp_path / "checkpoint-2") if request_ == "folder" else request_
    recorder = Recorder()
    resumed = make(tmp_path, recorder, resume_from_checkpoint=request_)
    resumed.train()
    named = [r.getMessage() for r in caplog.records if r.getMessage().startswith("resuming from")]
    assert [f"resuming from {tmp_path / ('checkpoint-2' if len(str(request_)) > 4 else 'checkpoint-4')}"] == named
    steps = [step for event, step in recorder.events if event == "on_step_end"]
    assert ([3, 4] if isinstance(request_, str) and request_ != "auto" else []) == steps
    assert_same_weights(weights(whole.model), weights(resumed.model))


def test_auto_begins_anew_where_there_is_no_checkpoint(tmp_path):
    assert 1 == make(tmp_path / "new", max_steps=1, resume_from_checkpoint="auto").train().global_step


def test_auto_passes_over_a_checkpoint_that_was_cut_off(tmp_path, caplog):
    make(tmp_path).train()
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    recorder = Recorder()
    make(tmp_path, recorder, resume_from_checkpoint="auto").train()
    assert [3, 4] == [step for event, step in recorder.events if event == "on_step_end"]
    assert "skipped" in caplog.text


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint folder") as caught:
        make(tmp_path, resume_from_checkpoint=str(tmp_path / "absent")).train()
    assert "FG601" == caught.value.code


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path, number, status):
    before = signal.getsignal(number)
    stopped = make(tmp_path, At(3, lambda: os.kill(os.getpid(), number)), max_steps=9, save_steps=100)
    with pytest.raises(KeyboardInterrupt) as caught:
        stopped.train()
    assert status == 128 + getattr(caught.value, "signal_number", signal.SIGINT)
    assert ["checkpoint-3"] == sorted(os.listdir(tmp_path))
    assert before is signal.getsignal(number)


def test_callbacks_close_what_they_opened_when_the_run_fails(tmp_path, capsys):
    def fail():
        raise ZeroDivisionError("in a callback")

    with pytest.raises(ZeroDivisionError):
        make(tmp_path, RunSummaryCallback(run_dir=tmp_path / "run"), At(2, fail)).train()
    assert (tmp_path / "run" / "summary.json").exists()
    assert "run failed: 2 steps" in capsys.readouterr().out


def test_a_run_that_never_began_reports_nothing(tmp_path, capsys):
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    summary = RunSummaryCallback(run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="num_samples"):
        HFTrainer(tiny_llama(), args, train_dataset=[], callbacks=[summary]).train()
    assert "" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", "fast"), ("max_steps", "ten"), ("per_device_train_batch_size", 0)]
)
def test_a_number_of_the_wrong_kind_is_refused_by_name(tmp_path, name, value):
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    setattr(args, name, value)
    with pytest.raises(SettingError, match=name) as caught:
        HFTrainer(tiny_llama(), args, train_dataset=rows())
    assert ("FG813", f"args.{name}") == (caught.value.code, caught.value.argument)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory is pinned where there is an accelerator")
def test_a_run_on_the_cpu_says_nothing_of_its_own(tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path).train()
    assert ("", "") == tuple(capfd.readouterr())


def test_what_was_drawn_before_the_training_does_not_change_it(tmp_path):
    trained = []
    for seed in (1, 2):
        trainer = make(tmp_path / str(seed))
        torch.manual_seed(seed)
        trainer.train()
        trained.append(weights(trainer.model))
    assert_same_weights(*trained)
