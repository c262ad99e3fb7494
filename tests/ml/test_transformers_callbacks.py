"""Callbacks written for transformers hear from our trainer what they hear from theirs."""

import json

import pytest
import transformers
from transformers import EarlyStoppingCallback, PrinterCallback
from transformers.integrations import TensorBoardCallback

from forgather.ml import Trainer, TrainingArguments
from tests.ml.fixtures import Recorder, assert_same_weights, rows, tiny_llama, weights

JOBS = {
    "steps": {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3},
    "epochs": {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"},
    "accumulation": {"gradient_accumulation_steps": 3, "logging_first_step": True, "save_strategy": "no"},
    "max_steps": {"max_steps": 5, "logging_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_on_start": True},
    "best": {
        "eval_strategy": "epoch",
        "save_strategy": "best",
        "metric_for_best_model": "eval_loss",
        "logging_strategy": "no",
    },
    "shares": {"logging_steps": 0.25, "save_strategy": "steps", "save_steps": 0.5, "warmup_steps": 0.5},
    "delay": {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5, "save_strategy": "no"},
}


@pytest.fixture
def hear(tmp_path):
    def run(trainer_class, arguments_class, job, *callbacks, **more):
        args = arguments_class(
            **{
                "output_dir": str(tmp_path / trainer_class.__module__),
                "per_device_train_batch_size": 2,
                "num_train_epochs": 2,
                "use_cpu": True,
                "disable_tqdm": True,
                "learning_rate": 1e-2,
                "dataloader_pin_memory": False,
                **job,
            }
        )
        recorder = Recorder()
        trainer = trainer_class(
            tiny_llama(),
            args,
            train_dataset=rows(),
            eval_dataset=rows(4, seed=5),
            callbacks=[*callbacks, recorder],
            **more,
        )
        trainer.train()
        return trainer, recorder

    return run


def theirs(hear, job, *callbacks):
    trainer, recorder = hear(transformers.Trainer, transformers.TrainingArguments, job, *callbacks)
    return trainer, recorder


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_sequence_of_events_is_that_of_transformers(hear, job, capsys):
    _, expected = theirs(hear, job)
    _, actual = hear(Trainer, TrainingArguments, job)
    assert expected.events == actual.events


@pytest.mark.parametrize("job", [JOBS["steps"], JOBS["epochs"]], ids=["steps", "epochs"])
def test_log_lines_have_the_names_of_transformers_and_more(hear, job, capsys):
    _, expected = theirs(hear, job)
    _, actual = hear(Trainer, TrainingArguments, job)
    ours, known = actual.lines, expected.lines
    assert [line["epoch"] for line in known] == [line["epoch"] for line in ours]
    missing = [set(old) - set(new) - {"total_flos"} for old, new in zip(known, ours, strict=True)]
    assert [set()] * len(known) == missing
    rates = [line["learning_rate"] for line in known if "learning_rate" in line]
    assert rates == pytest.approx([line["learning_rate"] for line in ours if "learning_rate" in line])


def test_every_step_line_has_the_promised_numbers(hear, capsys):
    _, recorder = hear(Trainer, TrainingArguments, JOBS["steps"])
    lines = [line for line in recorder.lines if "loss" in line]
    promised = {
        "loss", "learning_rate", "grad_norm", "tokens_per_second", "steps_per_second", "memory_bytes", "epoch", "data_wait_share",
    }  # fmt: skip
    assert [promised] * 8 == [set(line) for line in lines]
    assert all(isinstance(value, int | float) for line in lines for value in line.values())


def test_tensorboard_and_printer_callbacks_work_unchanged(hear, tmp_path, capsys, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer, recorder = hear(Trainer, TrainingArguments, JOBS["steps"], TensorBoardCallback(), PrinterCallback())
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    losses = [scalar.value for scalar in events.Scalars("train/loss")]
    assert losses == pytest.approx([line["loss"] for line in recorder.lines if "loss" in line])
    assert {"eval/loss", "train/learning_rate", "train/grad_norm"} <= set(events.Tags()["scalars"])
    assert "'loss': " in capsys.readouterr().out


def test_early_stopping_stops_where_it_stops_in_transformers(hear, capsys):
    job = {
        "num_train_epochs": 6,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "learning_rate": 0.1,
        "train_sampling_strategy": "sequential",
        "logging_strategy": "no",
    }
    expected, _ = theirs(hear, job, EarlyStoppingCallback(1))
    actual, _ = hear(Trainer, TrainingArguments, job, EarlyStoppingCallback(1))
    assert expected.state.global_step == actual.state.global_step < 24
    assert expected.state.best_global_step is not None
    assert actual.state.best_global_step is not None


@pytest.mark.parametrize("job", [{"num_train_epochs": 3}, {"max_steps": 7}], ids=["epochs", "max_steps"])
def test_epochs_that_a_callback_cuts_short_are_not_made_up_for(hear, job, capsys):
    class Cut(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 4 == 2

    job = {**job, "logging_strategy": "no", "save_strategy": "no"}
    expected, _ = theirs(hear, job, Cut())
    actual, _ = hear(Trainer, TrainingArguments, job, Cut())
    assert expected.state.global_step == actual.state.global_step
    assert expected.state.global_step < expected.state.max_steps


def test_a_callback_finds_what_transformers_passes(settings):
    found = {}

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            found.update(kwargs)

    trainer = Trainer(tiny_llama(), settings(), train_dataset=rows(), callbacks=[Look])
    trainer.train()
    passed = {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"}
    assert {"task", *passed} == set(found)
    assert trainer.model is found["model"]
    assert trainer.optimizer is found["optimizer"]


def test_arguments_answer_what_trackers_ask(settings):
    args = settings(run_name="one", lr_scheduler_kwargs={"num_cycles": 1}, lr_scheduler_type="cosine")
    assert "one" == args.run_name
    assert (0, 0, 1, 1) == (args.process_index, args.local_process_index, args.world_size, args.n_gpu)
    assert all(isinstance(value, bool | int | float | str) for value in args.to_sanitized_dict().values())
    assert {"num_cycles": 1} == json.loads(args.to_json_string())["lr_scheduler_kwargs"]
    assert isinstance(args.get_process_log_level(), int)
    assert args.hub_model_id is None
    assert not args.push_to_hub


@pytest.mark.parametrize("restores", [False, True])
def test_what_callbacks_counted_goes_on_and_their_settings_do_on_request(settings, restores):
    job = {"save_strategy": "epoch", "eval_strategy": "epoch", "metric_for_best_model": "loss", "num_train_epochs": 2}
    first = EarlyStoppingCallback(99)
    first.early_stopping_patience_counter = 3
    Trainer(tiny_llama(), settings(**job), train_dataset=rows(), eval_dataset=rows(), callbacks=[first]).train()
    counter = first.early_stopping_patience_counter
    fresh = EarlyStoppingCallback(98)
    args = settings(**job, restore_callback_states_from_checkpoint=restores)
    trainer = Trainer(tiny_llama(), args, train_dataset=rows(), eval_dataset=rows(), callbacks=[fresh])
    trainer.train(resume_from_checkpoint=True)
    assert counter == fresh.early_stopping_patience_counter
    assert (99 if restores else 98) == fresh.early_stopping_patience


def test_a_callback_can_stop_save_and_evaluate(settings):
    class Ask(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = control.should_evaluate = state.global_step == 2
            control.should_training_stop = state.global_step == 3
            return control

    recorder = Recorder()
    args = settings(save_strategy="steps", save_steps=100)
    trainer = Trainer(tiny_llama(), args, train_dataset=rows(), eval_dataset=rows(), callbacks=[Ask(), recorder])
    assert 3 == trainer.train().global_step
    assert [("on_evaluate", 2), ("on_save", 2), ("on_save", 3)] == [
        item for item in recorder.events if item[0] in ("on_evaluate", "on_save")
    ]


def test_callbacks_change_no_weight(settings):
    expected, actual = tiny_llama(attention_dropout=0.1), tiny_llama(attention_dropout=0.1)
    Trainer(expected, settings(), train_dataset=rows()).train()
    busy = settings(logging_strategy="steps", logging_steps=1, eval_strategy="steps", eval_steps=1)
    Trainer(actual, busy, train_dataset=rows(), eval_dataset=rows(), callbacks=[Recorder()]).train()
    assert_same_weights(weights(expected), weights(actual))
