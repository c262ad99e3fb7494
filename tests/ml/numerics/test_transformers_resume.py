"""A run that transformers' Trainer began goes on here with the losses that it would have had there."""

import json
import logging
import pickle
import shutil

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.trainer.transformers_reader import optimizer_by_name
from tests.matrix import thinned
from tests.ml.fixtures import assert_same_weights, rows, tiny_llama, weights

STEPS, ROWS = 12, 18  # five steps an epoch, the last one of a single micro-batch
WORDS = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "seed": 7,
    "per_device_train_batch_size": 2,
    "use_cpu": True,
    "report_to": "none",
}

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def model(seed=0):
    return tiny_llama(seed, attention_dropout=0.1)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("theirs")
    args = transformers.TrainingArguments(str(folder), disable_tqdm=True, **WORDS)
    trainer = transformers.Trainer(model(), args, train_dataset=rows(ROWS))
    trainer.train()
    return trainer


def folder_of(theirs, step):
    return f"{theirs.args.output_dir}/checkpoint-{step}"


def ours(settings, **given):
    return Trainer(model(seed=5), settings(**{**WORDS, **given}), train_dataset=rows(ROWS))


def losses(trainer):
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


@pytest.mark.parametrize("step", thinned([1, 3, 4, 5, 9, 10, 11], lambda step: step == 3))
def test_the_run_goes_on_as_it_would_have_there(theirs, settings, step):
    trainer = ours(settings)
    trainer.train(resume_from_checkpoint=folder_of(theirs, step))
    # Bits, with dropout: order, random numbers, moments and rates are all those of transformers.
    assert losses(theirs) == losses(trainer)
    assert_same_weights(weights(theirs.model), weights(trainer.model))


def test_a_checkpoint_of_the_continued_run_keeps_the_order(theirs, settings, tmp_path):
    first = ours(settings)
    first.train(resume_from_checkpoint=folder_of(theirs, 3))
    for step in range(7, STEPS + 1):
        shutil.rmtree(f"{first.args.output_dir}/checkpoint-{step}")
    second = ours(settings)
    second.train(resume_from_checkpoint=True)
    assert losses(theirs) == losses(second)
    assert_same_weights(weights(theirs.model), weights(second.model))


@pytest.mark.matrix
def test_another_order_gives_other_losses(theirs, settings):
    trainer = ours(settings, data_seed=8)
    trainer.train(resume_from_checkpoint=folder_of(theirs, 3))
    assert losses(theirs)[4] != losses(trainer)[4]


def test_each_part_is_said_in_one_line(theirs, settings, caplog):
    caplog.set_level(logging.WARNING)
    ours(settings, max_steps=10).train(resume_from_checkpoint=folder_of(theirs, 9))
    said = [" ".join(line.split()) for line in caplog.messages]
    for start in (
        "weights taken over from model.safetensors",
        "optimizer taken over: 21 weights in 2 groups, named by the order of transformers",
        "schedule taken over: step 9; the rate is",
        "random taken over",
        "data epoch 1, row 16 of 18, in the order of transformers with the seed 7",
        "log taken over: 9 lines",
        "settings those of this run: training_args.bin is a pickle, and is not read",
    ):
        assert 1 == sum(line.startswith(start) for line in said), start


@pytest.fixture
def copy(theirs, tmp_path):
    folder = tmp_path / "copy" / "checkpoint-3"
    shutil.copytree(folder_of(theirs, 3), folder)
    return folder


def refused(settings, folder, match, **given):
    with pytest.raises(CheckpointError, match=match):
        ours(settings, **given).train(resume_from_checkpoint=str(folder))


class _Attack:
    def __reduce__(self):
        return (exec, ("raise SystemExit(7)",))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_that_runs_code_is_refused(copy, settings, name):
    torch.save({"state": _Attack(), "param_groups": [], "python": 0, "numpy": 0, "cpu": 0}, copy / name)
    refused(settings, copy, f"FG615.*{name}.*could run code")


def test_the_pickled_arguments_are_not_opened(copy, settings):
    (copy / "training_args.bin").write_bytes(pickle.dumps(_Attack()))
    trainer = ours(settings, max_steps=4)
    trainer.train(resume_from_checkpoint=str(copy))
    assert 4 == trainer.state.global_step


def test_what_is_missing_must_be_allowed(copy, settings, caplog):
    (copy / "optimizer.pt").unlink()
    refused(settings, copy, "FG608.*has no optimizer")
    trainer = ours(settings, max_steps=4, allow_missing=["optimizer"])
    trainer.train(resume_from_checkpoint=str(copy))
    assert "not in the checkpoint: the optimizer starts without its moments" in caplog.text


def test_other_rows_and_other_engines_are_refused(copy, settings):
    trainer = Trainer(model(), settings(**WORDS), train_dataset=rows(22))
    with pytest.raises(CheckpointError, match="FG610.*22 rows give 11"):
        trainer.train(resume_from_checkpoint=str(copy))
    (copy / "global_step3").mkdir()
    refused(settings, copy, "FG614.*under DeepSpeed")


def test_damage_is_located(copy, settings):
    (copy / "scheduler.pt").write_bytes(b"x" * 100)
    refused(settings, copy, "FG61[15].*scheduler.pt")
    (copy / "trainer_state.json").write_text(json.dumps({"global_step": -3}))
    refused(settings, copy, "FG611.*global_step is -3")


def test_an_optimizer_state_that_fits_no_order_is_refused(theirs, tmp_path):
    state = torch.load(f"{folder_of(theirs, 3)}/optimizer.pt", weights_only=True)
    present = theirs.optimizer.param_groups
    state["param_groups"][0]["params"].append(99)
    with pytest.raises(CheckpointError, match="FG616.*groups of 17 and 5 weights"):
        optimizer_by_name(state, model(), present, tmp_path)
    with pytest.raises(CheckpointError, match="FG616.*another optimizer, whose groups differ in .*momentum"):
        optimizer_by_name(state, model(), torch.optim.SGD(model().parameters()).param_groups, tmp_path)


@pytest.mark.matrix
def test_auto_takes_it_until_there_is_a_checkpoint_of_our_own(copy, settings, caplog):
    trainer = ours(settings, output_dir=str(copy.parent), max_steps=5)
    trainer.train(resume_from_checkpoint="auto")
    assert "checkpoint-3 (step 3 of 5" in caplog.text
    caplog.clear()
    ours(settings, output_dir=str(copy.parent), max_steps=6).train(resume_from_checkpoint="auto")
    assert "checkpoint-5 (step 5 of 6" in caplog.text


class Stream(IterableDataset):
    def __iter__(self):
        yield from rows(60)


@pytest.mark.parametrize(
    "accumulation",
    [{"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 1, "accumulate_grad_batches": {0: 2, 8: 4}}],
    ids=["constant", "scheduled"],
)
def test_a_stream_is_read_past_the_rows_of_the_steps_that_were_done(theirs, settings, caplog, accumulation):
    caplog.set_level(logging.WARNING)
    words = {**WORDS, **accumulation, "max_steps": 4}
    args = settings(**words, train_sampling_strategy="sequential")
    Trainer(model(seed=5), args, train_dataset=Stream()).train(resume_from_checkpoint=folder_of(theirs, 3))
    assert "12 rows of the stream are read past" in caplog.text


def _torch_file(name, change):
    def damage(folder):
        state = torch.load(folder / name, weights_only=True)
        change(state)
        torch.save(state, folder / name)

    return damage


def _state(**values):
    def damage(folder):
        file = folder / "trainer_state.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


FORMS = {
    "state": (_torch_file("optimizer.pt", lambda found: found.update(state=None)), "FG616"),
    "groups": (_torch_file("optimizer.pt", lambda found: found.update(param_groups=3)), "FG616"),
    "group": (_torch_file("optimizer.pt", lambda found: found.update(param_groups=[[1]])), "FG616"),
    "no numbers": (_torch_file("optimizer.pt", lambda found: found["param_groups"][0].pop("params")), "FG616"),
    "entry": (_torch_file("optimizer.pt", lambda found: found["state"].update({0: "x"})), "FG616"),
    "moment": (_torch_file("optimizer.pt", lambda found: found["state"][0].update(exp_avg=None)), "FG616"),
    "steps": (_torch_file("scheduler.pt", lambda found: found.update(_step_count="x")), "FG6"),
    "log": (_state(log_history={}), "FG6"),
    "epoch": (_state(epoch=None), "FG6.*epoch"),
    "config": (lambda folder: (folder / "config.json").write_text("{"), "FG611.*config.json"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_another_form_is_one_located_error(copy, settings, form):
    damage, code = FORMS[form]
    damage(copy)
    refused(settings, copy, code)


@pytest.mark.parametrize("value", [3, float("nan"), b"x", [], "x" * 5000, "a\0b"], ids=str)
def test_what_is_no_folder_is_refused(settings, value):
    with pytest.raises(CheckpointError, match="FG601"):
        ours(settings).train(resume_from_checkpoint=value)
