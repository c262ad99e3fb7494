"""Trackers of `report_to`: which are accepted, what the guard keeps true, and what a resumed run continues.

The library of a tracker stands for those that exist: `Library` does to a process whatever one of them does. The real
ones are run by `make oracles`; `test_tracker_records.py` reads what they recorded.
"""

import os
import random
import signal
from importlib.util import find_spec

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forgather import trackers as names
from forgather.errors import TrainingError
from forgather.ml.callbacks import TBLogger, TrainerCallback
from forgather.ml.callbacks.tracker import ShownModel, TrackerCallback, guarded
from forgather.ml.callbacks.tracker_libraries import shortened
from forgather.ml.callbacks.trackers import tracker_callbacks
from tests.ml import callback_scene as scene

SECRET = "planted-3f9a7c21"


class Library(TrainerCallback):
    """A callback like those of transformers, with a library that draws numbers and takes signals."""

    fails = ()

    def __init__(self):
        self._initialized = False
        self.events, self.lines, self.sent = [], [], {}

    def setup(self, args, state, model=None, **kwargs):
        self._initialized = True
        self.sent = {**model.config.to_dict(), **args.to_dict(), "num_parameters": model.num_parameters()}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        random.random(), torch.rand(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._hear("on_train_begin", state)
        if not self._initialized:
            self.setup(args, state, model, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        random.random(), torch.rand(3)
        self._hear("on_log", state)
        self.lines.append((state.global_step, logs))

    def on_train_end(self, args, state, control, **kwargs):
        self._hear("on_train_end", state)

    def _hear(self, event, state):
        self.events.append(event)
        if event in self.fails:
            raise ConnectionError(f"no answer from https://user:{SECRET}@host")


class Standing(TrackerCallback):
    """The tracker of `Library`, which knows a run by a number."""

    tracker = "library"
    has = -1
    opened = None

    def open(self, args, state):
        self.opened = self.tracked["id"] if self.tracked else "run-1"

    def run_id(self):
        return self.opened

    def last_step(self, name):
        return self.has

    def end(self, error):
        self.ended_by = error


def made(**attributes):
    return type("Standing", (guarded(Standing, Library),), attributes)()


def losses_with(folder, *callbacks, kind="ours", **settings):
    trainer = scene.trainer(kind, folder, list(callbacks), logging_steps=1, max_steps=4, eval_strategy="no", **settings)
    resumes = settings.get("resume_from_checkpoint")
    trainer.train(resume_from_checkpoint=resumes) if kind == "hf" else trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return losses_with(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("fails", [(), ("on_train_begin",), ("on_log",), ("on_train_end",)], ids="-".join)
def test_the_losses_are_the_same_whatever_the_library_does(tmp_path, plain, fails, caplog):
    tracker, before = made(fails=fails), signal.getsignal(signal.SIGTERM)
    assert plain == losses_with(tmp_path, tracker)
    assert before is signal.getsignal(signal.SIGTERM)
    told = [line for line in caplog.messages if line.startswith("library failed")]
    assert {(): 0, ("on_log",): 2}.get(fails, 1) == len(told)
    assert not any(SECRET in line for line in told)
    # What failed at its begin is not called again, and what fails three times in a row is not called a fourth time.
    assert {("on_train_begin",): 1, ("on_log",): 4}.get(fails, 7) == len(tracker.events)


def test_a_tracker_gets_numbers_and_settings_without_secrets(tmp_path):
    tracker = made()
    tracker.on_train_begin(scene.arguments(tmp_path, api_key=SECRET, run_name=None), scene.state(), None, model=model())
    assert SECRET not in str(tracker.sent)
    assert {"(hidden)", 10, 0} <= {tracker.sent[name] for name in ("api_key", "vocab_size", "process_index")}
    tracker.on_log(
        scene.arguments(tmp_path, run_name=None),
        scene.state(3),
        None,
        logs={"loss": torch.tensor(2.0), "note": "words", "ok": True, "many": torch.zeros(2)},
    )
    assert [(3, {"loss": 2.0})] == tracker.lines


def model():
    shown = scene.tiny_model()
    shown.config.auth_token = SECRET
    return shown


def test_the_configuration_of_a_model_is_redacted():
    shown = ShownModel(model())
    assert "(hidden)" == shown.config.to_dict()["auth_token"]
    assert SECRET not in shown.config.to_json_string()
    assert ShownModel(None).config is None


@pytest.mark.parametrize("kind", ["ours", "hf"])
def test_a_resumed_run_continues_the_run_of_the_tracker(tmp_path, kind):
    saves = {"save_strategy": "steps", "save_steps": 2, "kind": kind}
    first = made()
    losses_with(tmp_path, first, **saves)
    first.opened = None
    second = made(has=3)
    losses_with(tmp_path, second, **saves, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert ("run-1", True) == (second.opened, second._resumes)
    # The library has step 3, from before the kill; what the run does again is not reported again.
    assert [4] == [step for step, line in second.lines if "loss" in line]
    assert [1, 2, 3, 4] == [step for step, line in first.lines if "loss" in line]


def test_a_run_from_the_checkpoint_of_another_folder_is_a_new_one(tmp_path, caplog):
    tracker = made()
    tracker.tracked = {"id": "run-0", "output_dir": "/elsewhere"}
    tracker.on_train_begin(scene.arguments(tmp_path, run_name=None), scene.state(2), None, model=model())
    assert ("run-1", False) == (tracker.opened, tracker._resumes)
    assert "library starts a new run: the checkpoint is from /elsewhere" in caplog.messages


def test_the_run_of_a_tracker_is_told_how_the_training_ended(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyError("own mistake")

    tracker = made()
    with pytest.raises(KeyError) as raised:
        losses_with(tmp_path, tracker, Stops())
    assert raised.value is tracker.ended_by


def absent(library):
    return pytest.mark.skipif(find_spec(library) is not None, reason=f"{library} is installed")


@pytest.mark.parametrize(
    ("report_to", "code", "words"),
    [
        ("wandbb", "FG583", "did you mean 'wandb'?"),
        (["tensorboard", "nothing like it"], "FG583", "one of: tensorboard, wandb, mlflow"),
        ("neptune", "FG881", "report_to: neptune needs neptune, which is not installed"),
        pytest.param("comet", "FG881", "pip install 'forgather[comet]'", marks=absent("comet_ml")),
        pytest.param("wandb", "FG881", "wandb >= 0.20, which is not installed", marks=absent("wandb")),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_when_the_trainer_is_made(tmp_path, report_to, code, words):
    for kind in ("ours", "hf"):
        with pytest.raises(TrainingError) as raised:
            scene.trainer(kind, tmp_path, [], {"optimizer_factory": None}, report_to=report_to)
        assert code == raised.value.code
        assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("wandb", "WANDB_LOG_MODEL", "end"),
        ("wandb", "WANDB_WATCH", "all"),
        ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "TRUE"),
        ("comet_ml", "COMET_LOG_ASSETS", "1"),
    ],
)
def test_a_variable_that_asks_for_uploads_is_refused(name, variable, value):
    codes = [fault.code for fault in names.tracker_faults(name, {variable: value})]
    assert "FG584" in codes
    assert codes.count("FG584") == 1 + len([one for one in names.tracker_faults(name, {}) if one.code == "FG584"])


def test_a_library_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    metadata = tmp_path / "aim-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: aim\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TrainingError, match="aim cannot be used: ModuleNotFoundError") as raised:
        tracker_callbacks("aim")
    assert "FG585" == raised.value.code


def test_one_name_gives_one_callback_on_the_main_process_alone(tmp_path, monkeypatch):
    assert [TBLogger] == [type(one) for one in tracker_callbacks(["tensorboard", "tensorboard"])]
    assert [] == tracker_callbacks("tensorboard", [TBLogger()])
    assert [] == tracker_callbacks(["none"]) == tracker_callbacks(None)
    assert TBLogger in [type(one) for one in tracker_callbacks("all")]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [] == tracker_callbacks("tensorboard")


def test_transformers_adds_no_second_callback(tmp_path):
    trainer = scene.trainer("hf", tmp_path, [], {"optimizer_factory": None}, report_to="tensorboard")
    tensorboard = [type(one).__name__ for one in trainer.callback_handler.callbacks if "T" in type(one).__name__[:2]]
    assert ["TBLogger"] == tensorboard
    assert ["tensorboard"] == trainer.args.report_to


def test_tensorboard_gets_the_config_and_the_line_that_set_each_value(tmp_path):
    (tmp_path / "config.yaml").write_text(f"trainer_args:\n    seed: 42\n    api_key: {SECRET}\n")
    (tmp_path / "origins.txt").write_text("trainer_args.seed = 42  # lib:trainers/base.yaml:120\n")
    (tracker,) = tracker_callbacks("tensorboard")
    tracker.on_train_begin(scene.arguments(tmp_path), scene.state(), None)
    tracker.on_train_end(scene.arguments(tmp_path), scene.state(), None)
    events = EventAccumulator(os.fspath(tmp_path)).Reload()
    (config,) = events.Tensors("config.yaml/text_summary")
    (origins,) = events.Tensors("origins.txt/text_summary")
    assert b"seed: 42" in config.tensor_proto.string_val[0]
    assert SECRET.encode() not in config.tensor_proto.string_val[0]
    assert b"lib:trainers/base.yaml:120" in origins.tensor_proto.string_val[0]


def test_settings_are_one_level_of_short_texts_for_mlflow():
    assert {"a.b": "12", "c_0_": "No"} == shortened({"a": {"b": 123}, "c[0]": None}, 2)
