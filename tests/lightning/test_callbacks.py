"""The callbacks with Lightning's names do what Lightning's do, in runs of our trainers."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forgather.errors import TrainingError
from forgather.lightning import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer, seed_everything
from forgather.lightning.callbacks import GradientAccumulationScheduler
from forgather.lightning.checkpoint_names import CheckpointNames, checkpoint_name
from forgather.lightning.run_limits import RunLimits, TorchSwitches
from forgather.lightning.seeds import SEED, given_seed
from forgather.lightning.words import read_words
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.callbacks.base import TrainerCallback, TrainerControl
from forgather.ml.trainer.argument_checks import SettingError
from tests.ml.fixtures import Regression, regression_rows

RECORDED = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))


def trained(folder, callbacks, **settings):
    settings = {"num_train_epochs": 4, "per_device_train_batch_size": 4, "save_strategy": "no", **settings}
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, eval_strategy="epoch", report_to="none", **settings)
    rows = regression_rows()
    trainer = Trainer(model=Regression(), args=args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    trainer.train()
    return trainer.state


def links(folder):
    return {link.name: os.readlink(link) for link in folder.glob("*.ckpt")}


def test_a_name_is_that_of_lightning():
    for pattern, values, inserts, expected in RECORDED["names"]:
        assert expected == checkpoint_name(pattern, values, auto_insert_metric_name=inserts) + ".ckpt"


def test_early_stopping_ends_a_run_where_lightning_does():
    for options, course, ended in RECORDED["stops"]:
        stopping, control, found = EarlyStopping("loss", **options), TrainerControl(), None
        for number, value in enumerate(map(float, course)):
            state = SimpleNamespace(epoch=number, is_world_process_zero=True)
            stopping.on_evaluate(None, state, control, metrics={"eval_loss": value})
            if control.should_training_stop:
                found = number
                break
        assert ended == found, (options, course)
    assert {None, 0, 1, 5} <= {ended for *_, ended in RECORDED["stops"]}


def test_early_stopping_goes_on_where_a_checkpoint_left_it():
    first = EarlyStopping("loss", patience=2, min_delta=0.1)
    state, control = SimpleNamespace(epoch=1, is_world_process_zero=True), TrainerControl()
    for value in (1.0, 0.95):
        first.on_evaluate(None, state, control, metrics={"eval_loss": value})
    resumed = EarlyStopping.from_state(first.state())
    resumed.on_evaluate(None, state, control, metrics={"eval_loss": 0.92})
    assert (2, True) == (resumed.wait_count, control.should_training_stop)


def test_a_missing_metric_is_an_error_unless_it_may_be_missing():
    state, control = SimpleNamespace(epoch=1, is_world_process_zero=True), TrainerControl()
    with pytest.raises(TrainingError, match="monitors 'val_los'") as error:
        EarlyStopping("val_los").on_evaluate(None, state, control, metrics={"eval_val_loss": 1.0})
    assert "FG821" == error.value.code
    EarlyStopping("val_los", strict=False).on_evaluate(None, state, control, metrics={"eval_val_loss": 1.0})
    assert not control.should_training_stop


def test_checkpoints_have_links_with_the_names_of_lightning(tmp_path):
    names = CheckpointNames(ModelCheckpoint(filename="model-{epoch:02d}-{loss:.1f}", save_last=True))
    state = trained(tmp_path, [names], save_strategy="epoch", save_total_limit=2)
    values = {line["step"]: line["eval_loss"] for line in state.log_history if "eval_loss" in line}
    assert {
        f"model-epoch=02-loss={values[6]:.1f}.ckpt": "checkpoint-6",
        f"model-epoch=03-loss={values[8]:.1f}.ckpt": "checkpoint-8",
        "last.ckpt": "checkpoint-8",
    } == links(tmp_path)
    assert all((tmp_path / name / "manifest.json").exists() for name in links(tmp_path))


def test_a_second_checkpoint_of_a_name_gets_a_number_or_takes_the_name(tmp_path):
    trained(tmp_path / "numbered", [CheckpointNames(ModelCheckpoint(filename="all"))], save_strategy="epoch")
    assert {"all.ckpt": "checkpoint-2", "all-v1.ckpt": "checkpoint-4"}.items() <= links(tmp_path / "numbered").items()
    replacing = CheckpointNames(ModelCheckpoint(filename="all", enable_version_counter=False))
    trained(tmp_path / "replaced", [replacing], save_strategy="epoch")
    assert {"all.ckpt": "checkpoint-8"} == links(tmp_path / "replaced")


def test_epochs_between_checkpoints_are_skipped(tmp_path):
    words = read_words(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(dirpath=tmp_path, every_n_epochs=2, save_top_k=-1)],
    )
    settings = {name: words.settings[name] for name in ("save_strategy", "num_train_epochs")}
    trained(tmp_path, words.callbacks, **settings)
    assert {"checkpoint-4", "checkpoint-8"} == {folder.name for folder in tmp_path.glob("checkpoint-*")}


def test_a_run_ends_at_its_epochs_though_steps_are_left(tmp_path):
    state = trained(tmp_path, [RunLimits(max_epochs=2)], max_steps=7)
    assert (4, 2.0) == (state.global_step, state.epoch)


class StopAtOnce(TrainerCallback):
    def on_step_end(self, args, state, control, **details):
        if state.global_step == 1:
            control.should_training_stop = True


def test_nothing_ends_a_run_before_its_least_length(tmp_path):
    assert 1 == trained(tmp_path / "a", [StopAtOnce()]).global_step
    assert 3 == trained(tmp_path / "b", [StopAtOnce(), RunLimits(min_steps=3)]).global_step
    assert 4 == trained(tmp_path / "c", [StopAtOnce(), RunLimits(min_epochs=2)]).global_step
    assert 8 == trained(tmp_path / "d", [StopAtOnce(), RunLimits(min_steps=99)]).global_step


def test_a_timer_ends_a_run_and_counts_on_after_a_resume(tmp_path):
    clock = iter(range(0, 1000, 10))
    timer = Timer("00:00:00:25", verbose=False, now=lambda: next(clock))
    assert 3 == trained(tmp_path, [timer]).global_step
    resumed = Timer.from_state(timer.state())
    assert resumed.time_elapsed() > 25 and resumed.time_remaining() < 0
    by_epoch = iter(range(0, 1000, 10))
    assert 6 == trained(tmp_path, [Timer({"seconds": 25}, "epoch", False, now=lambda: next(by_epoch))]).global_step
    for wrong in ({"duration": "1h"}, {"interval": "batch"}):
        with pytest.raises(SettingError):
            Timer(**wrong)


class Switches(TrainerCallback):
    def on_step_end(self, args, state, control, **details):
        self.seen = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.is_anomaly_enabled(),
        )


def test_switches_of_torch_hold_for_the_run_alone(tmp_path):
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    seen = Switches()
    words = read_words(
        max_epochs=1, deterministic="warn", benchmark=True, detect_anomaly=True, callbacks=[seen], logger=False
    )
    switches = [one for one in words.callbacks if isinstance(one, TorchSwitches)]
    trained(tmp_path, [*switches, seen], num_train_epochs=1)
    assert (True, True, True, True) == seen.seen
    after = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    assert before == after


def test_the_learning_rate_is_in_the_log_anyway(tmp_path):
    state = trained(tmp_path, [LearningRateMonitor("step")], logging_steps=1, num_train_epochs=1)
    assert all("learning_rate" in line for line in state.log_history if "loss" in line)
    for wrong, code in (({"log_momentum": True}, "FG811"), ({"logging_interval": "batch"}, "FG813")):
        with pytest.raises(SettingError) as error:
            LearningRateMonitor(**wrong)
        assert code == error.value.code


def test_an_object_of_words_is_no_callback_of_an_ordinary_trainer(tmp_path):
    """Its settings would be dropped without a word."""
    for one in (ModelCheckpoint(save_top_k=3), GradientAccumulationScheduler({0: 4})):
        with pytest.raises(TrainingError, match="is not a callback"):
            trained(tmp_path, [one])


def test_seed_everything_seeds_like_lightning_and_is_the_seed_of_a_run(monkeypatch):
    monkeypatch.setenv(SEED, "5")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    assert 5 == seed_everything()
    first = torch.rand(3)
    assert 42 == seed_everything(42, workers=True)
    torch.manual_seed(42)
    expected = torch.rand(2)
    seed_everything(42)
    assert torch.equal(expected, torch.rand(2)) and not torch.equal(first[:2], expected)
    assert (42, 42) == (given_seed(), read_words(max_epochs=1).settings["seed"])
    with pytest.raises(SettingError, match="seed is -1"):
        seed_everything(-1)
    monkeypatch.delenv(SEED)
    assert "seed" not in read_words(max_epochs=1).settings


# processes and objects


def launched(monkeypatch, world, local):
    for name, value in {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))


def test_devices_are_those_of_one_machine(monkeypatch):
    """The mistake of guides for Kubernetes: devices=int(os.getenv("WORLD_SIZE"))."""
    launched(monkeypatch, 4, 2)
    with pytest.raises(SettingError, match="2 on this machine") as error:
        read_words(strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
    assert ("FG704", "devices") == (error.value.code, error.value.argument)
    assert "devices=2, num_nodes=2" in error.value.hint
    with pytest.raises(SettingError):
        read_words(strategy="ddp", devices="auto")
    found = read_words(strategy="ddp", devices="auto", num_nodes=2, max_epochs=1)
    assert (4, 2) == (found.num_processes, found.processes_per_node)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert 4 == read_words(strategy="ddp", devices=int(os.environ["WORLD_SIZE"]), max_epochs=1).num_processes


def test_a_gpu_that_is_not_there_is_missed_at_once():
    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SettingError, match="no GPU") as error:
        read_words(accelerator="gpu", devices=4, precision="bf16-true")
    # All problems are told at once.
    assert "FG811" == error.value.code or error.value.__notes__


def test_every_problem_is_told(monkeypatch):
    with pytest.raises(SettingError) as error:
        read_words(precision="bf16-true", strategy="ddp_spawn", max_epoch=3)
    assert 2 == len(error.value.__notes__)


def test_a_metric_that_is_not_finite_ends_a_run():
    control = TrainerControl()
    state = SimpleNamespace(epoch=1, is_world_process_zero=True)
    EarlyStopping("loss", verbose=True).on_evaluate(None, state, control, metrics={"loss": math.nan})
    assert control.should_training_stop


@pytest.mark.parametrize("patience", [-1, "3", 2.5, True])
def test_a_patience_that_cannot_be_counted_is_refused_before_the_run(patience):
    with pytest.raises(SettingError, match=r"FG813.*EarlyStopping: patience is"):
        EarlyStopping("loss", patience=patience)


class Eager(EarlyStopping):
    """A user's own rule."""


def test_a_subclass_of_the_user_is_called_as_it_is(tmp_path):
    stopping = Eager("loss")
    assert stopping in read_words(callbacks=[stopping], default_root_dir=str(tmp_path), logger=False).callbacks
