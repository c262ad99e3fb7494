"""A run of several processes: one result, one decision, one writer."""

import gc
import itertools
import json
import os
import signal
import sys
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from forgather.errors import ForgatherError
from forgather.launch.multi_process import join_run
from forgather.ml import AccelTrainer, AccelTrainingArguments, Trainer, TrainingArguments
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.callbacks.metrics import JsonLogger
from forgather.ml.callbacks.text_sample import TextSampleCallback
from forgather.ml.distributed import collectives
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.state import on_host
from forgather.ml.trainer.resume import refuse_unreadable
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_shares import Stream, collate
from tests.ml.fixtures import Noisy, assert_same_weights, largest_difference, rows, tiny_llama, weights
from tests.patience import patience

COMMON = {
    "max_steps": 7,
    "logging_steps": 1,
    "save_strategy": "no",
    "learning_rate": 1e-3,
    "use_cpu": True,
    "remove_unused_columns": False,
}


def make(folder, *, batch_size, ranks, data=None, model=None, callbacks=(), **given):
    """Returns a trainer of one process, or the part of one of several."""
    several = {} if ranks == 1 else {"distributed_env": DistributedEnvironment(timeout_seconds=patience(20))}
    trainer, arguments = (Trainer, TrainingArguments) if ranks == 1 else (AccelTrainer, AccelTrainingArguments)
    objects = {name: given.pop(name) for name in ("eval_dataset", "processing_class") if name in given}
    return trainer(
        model or (lambda: tiny_llama().double()),
        arguments(str(folder), per_device_train_batch_size=batch_size, **{**COMMON, **given}),
        train_dataset=rows(13) if data is None else data,
        data_collator=collate,
        callbacks=callbacks,
        **objects,
        **several,
    )


def outcome(trainer, **call):
    trainer.train(**call)
    names = ("step", "loss", "grad_norm", "eval_loss", "learning_rate", "epoch", "train_loss")
    lines = [{name: line[name] for name in names if name in line} for line in trainer.state.log_history]
    return {
        "lines": lines,
        "weights": weights(trainer.model),
        "tokens": trainer.state.num_input_tokens_seen,
        "best": (trainer.state.best_global_step, trainer.state.best_metric),
        "step": trainer.state.global_step,
    }


def run(folder, ranks, batch_size, given):
    given = dict(given)
    evaluates = given.pop("evaluates", False)
    trainer = make(folder, ranks=ranks, batch_size=batch_size, **given)
    trainer.eval_dataset = rows(11, seed=5) if evaluates else None
    return outcome(trainer)


def assert_equal(expected, actual, tolerance=1e-10):
    assert [sorted(line) for line in expected["lines"]] == [sorted(line) for line in actual["lines"]]
    for one, other in zip(expected["lines"], actual["lines"], strict=True):
        assert one == pytest.approx(other, rel=tolerance)
    assert expected["tokens"] == actual["tokens"]
    assert expected["best"] == pytest.approx(actual["best"], rel=tolerance)
    assert largest_difference(expected["weights"], actual["weights"]) < tolerance


@pytest.mark.parametrize(
    ("kind", "accumulation", "ranks", "batch_size"),
    thinned(
        [(*case, *size) for case in itertools.product(["rows", "stream"], [1, 3]) for size in ((2, 2), (4, 1))],
        lambda kind, accumulation, ranks, batch_size: (kind, accumulation, ranks) in (("rows", 3, 4), ("stream", 1, 2)),
    ),
)
def test_several_processes_give_the_result_of_one(kind, accumulation, ranks, batch_size, tmp_path):
    given = {
        "data": Stream(13) if kind == "stream" else None, "gradient_accumulation_steps": accumulation, "evaluates": True, "eval_strategy": "steps",
        "eval_steps": 2, "metric_for_best_model": "loss", "per_device_eval_batch_size": 2,
    }  # fmt: skip
    alone = run(tmp_path / "alone", 1, 4, given)
    for one in run_ranks(ranks, run, tmp_path / "together", ranks, batch_size, given):
        assert_equal(alone, one)


def test_a_wrong_count_is_told_apart(tmp_path):
    """The negative control of the test above: other rows are another result."""
    alone = run(tmp_path / "alone", 1, 4, {})
    others = run(tmp_path / "others", 1, 2, {})
    assert largest_difference(alone["weights"], others["weights"]) > 1e-6


class Signals(TrainerCallback):
    """Sends its process a signal in the middle of a step."""

    def __init__(self, rank, number, step=3):
        self.rank, self.number, self.step = rank, number, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1 and args.process_index == self.rank:
            signal.raise_signal(self.number)


def stopped(folder, number):
    trainer = make(folder, ranks=2, batch_size=2, save_strategy="steps", callbacks=[Signals(1, number)])
    try:
        trainer.train()
    except KeyboardInterrupt as error:
        return type(error).__name__, trainer.state.global_step, error.__notes__
    return None


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")])
def test_all_processes_stop_where_one_is_asked_to(number, name, tmp_path):
    saved = f"the state of step 3 is saved in {tmp_path / 'checkpoint-3'}"
    assert [(name, 3, [saved])] * 2 == run_ranks(2, stopped, tmp_path, number)
    assert (tmp_path / "checkpoint-3" / "manifest.json").is_file()


class StopAt(TrainerCallback):
    """Of the user: it may look at what is not the same everywhere."""

    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == self.rank and state.global_step == self.step:
            control.should_training_stop = True


def stopped_by_callback(folder, rank):
    return outcome(make(folder, ranks=2, batch_size=2, callbacks=[StopAt(rank, 3)]))["step"]


@pytest.mark.parametrize(("rank", "step"), [(0, 3), (1, 7)])
def test_a_callback_that_decides_on_its_own_decides_on_the_writer(rank, step, tmp_path):
    assert [step, step] == run_ranks(2, stopped_by_callback, tmp_path, rank)


def interrupted_and_resumed(folder, ranks, batch_size, stop, given):
    given = {"save_strategy": "steps", "save_steps": 1, **given}
    if stop is not None:
        for step in stop:
            make(folder, ranks=ranks, batch_size=batch_size, callbacks=[StopAt(0, step)], **given).train(
                resume_from_checkpoint=True
            )
            torch.manual_seed(999)
    return outcome(make(folder, ranks=ranks, batch_size=batch_size, **given), resume_from_checkpoint=True)


@pytest.mark.parametrize("stop", thinned([[1], [4], [2, 5]], lambda stop: len(stop) == 2))
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(stop, tmp_path):
    given = {"data": Noisy(14), "model": dropping}
    whole = run_ranks(2, interrupted_and_resumed, tmp_path / "whole", 2, 2, None, given)
    resumed = run_ranks(2, interrupted_and_resumed, tmp_path / "resumed", 2, 2, stop, given)
    assert_same_weights(whole[0]["weights"], resumed[0]["weights"])
    assert_same_weights(resumed[0]["weights"], resumed[1]["weights"])


def dropping():
    return tiny_llama(attention_dropout=0.1)


@pytest.mark.parametrize("change", thinned([((1, 2),), ((2, 1),), ((2, 4),)], lambda change: change == (2, 1)))
def test_a_checkpoint_is_resumed_by_another_number_of_processes(change, tmp_path):
    alone = run(tmp_path / "alone", 1, 4, {})
    for ranks in change:
        stop = None if ranks == change[1] else [3]
        call = (tmp_path / "moved", ranks, 4 // ranks)
        results = run_ranks(ranks, part_of_run, *call, stop)
    for one in results:
        assert largest_difference(alone["weights"], one["weights"]) < 1e-10
        assert alone["tokens"] == one["tokens"]


def part_of_run(folder, ranks, batch_size, stop):
    given = {"save_strategy": "steps", "save_steps": 1}
    callbacks = [StopAt(0, step) for step in stop or ()]
    trainer = make(folder, ranks=ranks, batch_size=batch_size, callbacks=callbacks, **given)
    return outcome(trainer, resume_from_checkpoint=True)


class Unwritable(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self):
        return {**super().state_dict(), "thread": threading.current_thread()}


def fails_to_save(folder, given):
    trainer = AccelTrainer(
        tiny_llama,
        AccelTrainingArguments(str(folder), **{**COMMON, "save_strategy": "steps", "save_steps": 2, **given}),
        train_dataset=rows(16),
        lr_scheduler_factory=lambda optimizer: Unwritable(optimizer, lambda step: 1.0),
    )
    try:
        trainer.train()
    except ForgatherError as error:
        return error.code, error.message, trainer.state.global_step
    return None


def test_a_checkpoint_that_cannot_be_written_ends_the_run_on_every_process(tmp_path):
    first, second = run_ranks(2, fails_to_save, tmp_path, {})
    assert first == second
    assert ("FG606", 0) == (first[0], first[2])  # what a checkpoint takes is looked at before the first step


def test_a_folder_that_cannot_be_written_to_is_told_on_every_process(tmp_path):
    (tmp_path / "file").touch()
    found = run_ranks(2, fails_to_save, tmp_path / "file", {})
    assert ["FG817", "FG817"] == [code for code, _, _ in found]


def writes(folder, tokenizer):
    callbacks = [JsonLogger(), TextSampleCallback(("ab",), tokenizer, max_new_tokens=3)]
    trainer = make(folder, ranks=2, batch_size=2, save_strategy="steps", save_steps=3, callbacks=callbacks)
    trainer.train()
    return trainer.saved_to, trainer.state.is_world_process_zero


class Letters:
    """A tokenizer of a few letters."""

    eos_token_id = bos_token_id = 0
    pad_token_id = 0

    def __call__(self, text):
        return {"input_ids": [ord(letter) - 96 for letter in text]}

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(int(number)) for number in ids)


def test_one_process_writes(tmp_path, capfd):
    found = run_ranks(2, writes, tmp_path, Letters())
    assert [(tmp_path, True), (tmp_path, False)] == found
    assert 1 == capfd.readouterr().out.count("sample at step 7")
    (samples,) = tmp_path.glob("runs/*/samples.jsonl")
    assert [7] == [json.loads(line)["step"] for line in samples.read_text().splitlines()]
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 8)) and len(steps) == 8
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "LlamaForCausalLM" == type(model).__name__
    folders = sorted(path.name for path in tmp_path.glob("*checkpoint*"))
    assert ["checkpoint-3", "checkpoint-6", "checkpoint-7"] == folders


UNEVEN = {
    "rows": "the number of training rows differs between processes: 16 on rank 0 and 12 on rank 1",
    "stream": "the data ended after 3 batches on 1 of 2 processes, and continues on the others",
    "content": "the training data differs between processes: from rank 0 to rank 1, 16 of 16 compared rows differ",
    "content of a stream": "the beginning of the training data differs between processes: from rank 0 to rank 1, ",
}


def data_of(uneven, rank):
    if "content" in uneven:
        found = rows(16, seed=rank)
        return Ours(found) if "stream" in uneven else found
    count = 16 - 4 * rank
    return Stream(count) if uneven == "stream" else rows(count)


class Ours(torch.utils.data.IterableDataset):
    def __init__(self, found):
        self.found = found

    def __iter__(self):
        return iter(self.found)


def refused(folder):
    rank = DistributedEnvironment().rank
    found = {}
    for uneven in UNEVEN:
        trainer = make(folder / uneven, ranks=2, batch_size=2, data=data_of(uneven, rank))
        try:
            trainer.train()
        except ForgatherError as error:
            found[uneven] = error.code, error.message
    return found


def test_data_that_is_not_the_same_everywhere_is_an_error_and_no_deadlock(tmp_path):
    for found in run_ranks(2, refused, tmp_path):
        for uneven, message in UNEVEN.items():
            assert ("FG855", True) == (found[uneven][0], found[uneven][1].startswith(message)), found[uneven]


def draws(folder):
    trainer = make(folder, ranks=2, batch_size=2, max_steps=1)
    trainer.train()
    return torch.rand(3)


def test_replicas_draw_numbers_of_their_own(tmp_path):
    first, second = run_ranks(2, draws, tmp_path)
    assert not torch.equal(first, second)


def of_writer():
    DistributedEnvironment(timeout_seconds=patience(20)).start(use_cpu=True)
    found = [collectives.all_gather(os.environ["RANK"]), collectives.run_on_main(lambda: os.environ["RANK"])]
    try:
        collectives.run_on_main(fails)
    except Exception as error:  # noqa: BLE001 - the error is what is looked at
        found.append((getattr(error, "code", None), str(error)))
    return found


def fails():
    raise ZeroDivisionError("of rank zero")


def test_an_act_of_the_writer_has_one_outcome():
    first, second = run_ranks(2, of_writer)
    assert [["0", "1"], "0"] == first[:2] == second[:2]
    assert (None, "of rank zero") == first[2]
    assert "FG854" == second[2][0] and "ZeroDivisionError: of rank zero" in second[2][1]


def unseen(folder):
    DistributedEnvironment(timeout_seconds=patience(20)).start(use_cpu=True)
    try:
        refuse_unreadable(folder / os.environ["RANK"])
    except ForgatherError as error:
        return error.code, error.message
    return None


def test_a_checkpoint_that_one_process_does_not_see_is_refused_by_all(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "manifest.json").touch()
    first, second = run_ranks(2, unseen, tmp_path)
    assert "FG856" == first[0] == second[0] and "is not visible to rank 1" in second[1]


def test_weights_of_all_processes_are_kept_where_they_are_written():
    shared = torch.ones(2)
    weights_of_all = [("a", shared), ("b", shared), ("c", torch.zeros(1)), ("n", 3)]
    kept = on_host(iter(weights_of_all), keep=True)
    assert kept["a"] is kept["b"] and ["a", "b", "c", "n"] == list(kept)
    temporary = on_host(((str(number), torch.full((2,), float(number))) for number in range(9)), keep=True)
    assert list(range(9)) == [int(value[0]) for value in temporary.values()]
    assert {} == on_host(iter(weights_of_all), keep=False)


def _given_up():
    told = []
    sys.unraisablehook = told.append
    context = join_run()
    context.__enter__()
    del context
    gc.collect()
    return [repr(one.exc_value) for one in told]


def test_a_block_that_is_given_up_on_the_way_out_of_a_process_says_nothing():
    assert [[], []] == run_ranks(2, _given_up)
