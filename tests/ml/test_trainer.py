"""What a trainer does with models, data and mistakes."""

import functools
import math
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel, TrainerCallback

import forgather.ml
from forgather.errors import CheckpointError, DistributedError, TrainingError
from forgather.interrupt import SAME_SECONDS
from forgather.lightning import LightningModule
from forgather.ml import Trainer
from forgather.ml.checkpoint import list_checkpoints, verify
from forgather.ml.trainer.step_guard import FiniteGuard
from tests.ml.fixtures import (
    Recorder,
    Regression,
    assert_same_weights,
    largest_difference,
    regression_rows,
    rows,
    tiny_llama,
    weights,
)


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.base = regression_rows()

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        return self.base[index]


def plain(row):
    return {name: value.tolist() for name, value in row.items()}


def test_the_facade_names_the_trainer_and_nothing_else():
    assert {"Trainer", "TrainingArguments"} <= set(dir(forgather.ml))
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = forgather.ml.Trainr


def test_a_model_that_is_made_gets_the_weights_of_the_seed(settings):
    def make():
        return nn.Linear(2, 2)

    first, second = (Trainer(args=settings(seed=5), model_init=make).model for _ in range(2))
    other = Trainer(make, settings(seed=6)).model
    assert_same_weights(weights(first), weights(second))
    assert largest_difference(weights(first), weights(other)) > 0


@pytest.mark.parametrize("kind", ["list", "torch", "datasets", "columns", "lists"])
def test_every_kind_of_data_gives_the_same_weights(settings, kind):
    class Torch(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return rows()[index]

    data = {
        "list": rows,
        "torch": Torch,
        "datasets": lambda: Dataset.from_list([plain(row) for row in rows()]),
        "columns": lambda: Dataset.from_list([{**plain(row), "text": "not an input"} for row in rows()]),
        "lists": lambda: [{**plain(row), "text": "not an input"} for row in rows()],
    }[kind]()
    expected, actual = tiny_llama(), tiny_llama()
    Trainer(expected, settings(), train_dataset=rows()).train()
    Trainer(actual, settings(), train_dataset=data, eval_dataset=data).train()
    assert_same_weights(weights(expected), weights(actual))


def test_pairs_train_with_a_loss_function(settings):
    data = [(torch.randn(4), number % 3) for number in range(8)]
    model = nn.Linear(4, 3)
    trainer = Trainer(
        model, settings(num_train_epochs=40, learning_rate=0.1), train_dataset=data, eval_dataset=data,
        loss_fn=nn.CrossEntropyLoss(),
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


def test_a_loss_function_of_torch_equals_the_loss_of_the_model(settings):
    expected, actual = tiny_llama(), tiny_llama()
    Trainer(expected, settings(), train_dataset=rows()).train()
    Trainer(actual, settings(), train_dataset=rows(), loss_fn=nn.CrossEntropyLoss()).train()
    assert largest_difference(weights(expected), weights(actual)) < 1e-6


def test_a_collator_of_transformers_works(settings):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{number}": number for number in range(62)} | {"<pad>": 62, "<unk>": 63}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>")
    data = [{"input_ids": list(range(3 + number))} for number in range(8)]
    trainer = Trainer(
        tiny_llama(), settings(save_strategy="epoch"), train_dataset=data, processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )  # fmt: skip
    trainer.train()
    written = {file.name for file in Path(trainer.args.output_dir).iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= written


def test_several_evaluation_sets_are_named(settings):
    data = {"near": rows(), "far": rows(seed=3)}
    recorder = Recorder()
    metrics = Trainer(tiny_llama(), settings(), eval_dataset=data, callbacks=[recorder]).evaluate()
    assert {"eval_near_loss", "eval_far_loss"} <= set(metrics)
    assert 1 == len([event for event, _ in recorder.events if event == "on_evaluate"])


def test_evaluating_leaves_randomness_weights_and_training_mode_alone(settings):
    trainer = Trainer(tiny_llama(attention_dropout=0.1), settings(), eval_dataset=rows())
    trainer.model.train()
    before, state = weights(trainer.model), torch.get_rng_state()
    trainer.evaluate()
    assert torch.equal(state, torch.get_rng_state())
    assert_same_weights(before, weights(trainer.model))
    assert trainer.model.training


def test_a_layer_that_the_user_put_to_rest_stays_at_rest(settings):
    model = Regression()
    model.train()
    model.layers[2].eval()
    Trainer(
        model, settings(eval_strategy="epoch"), train_dataset=regression_rows(), eval_dataset=regression_rows()
    ).train()
    assert (True, False) == (model.training, model.layers[2].training)


def test_max_steps_wins_over_epochs_and_a_fraction_of_an_epoch_counts(settings):
    assert 6 == Trainer(Regression(), settings(max_steps=6), train_dataset=regression_rows()).train().global_step
    half = settings(num_train_epochs=1.5)
    assert 6 == Trainer(Regression(), half, train_dataset=regression_rows()).train().global_step


def test_a_last_batch_that_is_not_full_is_kept_or_dropped(settings):
    data = regression_rows(7)
    assert 4 == Trainer(Regression(), settings(), train_dataset=data).train().global_step
    drop = settings(dataloader_drop_last=True)
    assert 3 == Trainer(Regression(), drop, train_dataset=data).train().global_step


def test_nothing_is_written_without_saving_and_nothing_is_printed(settings, capfd):
    args = settings(logging_strategy="steps", logging_steps=1)
    Trainer(tiny_llama(), args, train_dataset=rows(), eval_dataset=rows()).train()
    assert not Path(args.output_dir).exists()
    Trainer(tiny_llama(), settings(save_strategy="epoch"), train_dataset=rows()).train()
    assert ("", "") == tuple(capfd.readouterr())


def test_training_twice_begins_anew_and_goes_on_with_the_weights(settings):
    trainer = Trainer(Regression(), settings(), train_dataset=regression_rows())
    trainer.train()
    assert 4 == trainer.train().global_step
    assert 4 == trainer.state.global_step


def test_labels_that_are_all_ignored_change_nothing(settings):
    data = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in rows()]
    model = tiny_llama()
    before = weights(model)
    output = Trainer(model, settings(optim="sgd"), train_dataset=data).train()
    assert 0.0 == output.training_loss
    assert_same_weights(before, weights(model))


def test_memory_and_rates_are_positive(settings):
    args = settings(logging_strategy="steps", logging_steps=2)
    recorder = Recorder()
    Trainer(tiny_llama(), args, train_dataset=rows(), callbacks=[recorder]).train()
    line = recorder.lines[0]
    assert line["memory_bytes"] > 50_000_000
    assert 24 == pytest.approx(line["tokens_per_second"] / line["steps_per_second"])


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_before_the_update(settings, poison):
    class Poisoned(Regression):
        calls = 0

        def forward(self, x, y):
            loss = super().forward(x, y)
            self.calls += 1
            if self.calls < 3:
                return loss
            return loss * float("nan") if poison == "loss" else torch.sqrt(loss * 0.0)

    model, found = Poisoned(), {}
    trainer = Trainer(
        model, settings(), train_dataset=regression_rows(), callbacks=[At(2, lambda: found.update(weights(model)))]
    )
    with pytest.raises(TrainingError, match=r"FG818.*at step 3 on rank 0; the update was not applied") as caught:
        trainer.train()
    assert "learning_rate" in caught.value.hint
    assert_same_weights(found, weights(model))


@pytest.mark.parametrize("poison", ["loss", "norm"])
def test_without_waiting_the_optimizer_leaves_the_update_out_by_itself(poison):
    """What happens on an accelerator, played on the CPU: the host learns of it at the next look."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    guard = FiniteGuard(optimizer, torch.device("cpu"), rank=0)
    guard.waits = False
    numbers = {"loss": torch.tensor(1.0), "norm": torch.tensor(1.0)}
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = weights(model)
        if step == 2:
            numbers[poison] = torch.tensor(float("inf"))
        guard.loss(numbers["loss"], step)
        guard.gradients(numbers["norm"], step)
        optimizer.step()
        assert (largest_difference(before, weights(model)) > 0) == (step == 1)
    with pytest.raises(TrainingError, match=r"FG818.*not finite at step 2 on rank 0"):
        guard.poll(wait=True)


BAD = {
    "no model": ("FG801", {"model": None}, {}),
    "no module": ("FG801", {"model": lambda: "text"}, {}),
    "no forward": ("FG801", {"model": torch.nn.Module}, {}),
    "steps of Lightning": ("FG801", {"model": LightningModule}, {}),
    "no data": ("FG802", {"train_dataset": None}, {}),
    "no rows": ("FG803", {"train_dataset": []}, {}),
    "no rows to evaluate": ("FG803", {"eval_dataset": []}, {"eval_strategy": "epoch"}),
    "large batch": ("FG804", {}, {"per_device_train_batch_size": 9}),
    "no length": ("FG805", {"train_dataset": (row for row in rows())}, {}),
    "no callback": ("FG815", {"callbacks": [object()]}, {}),
    "no metric": ("FG821", {"eval_dataset": rows()}, {"eval_strategy": "epoch", "metric_for_best_model": "accuracy"}),
    "no evaluation data": ("FG824", {}, {"eval_strategy": "epoch"}),
    "nothing to start with": ("FG824", {}, {"eval_on_start": True}),
    "no compiler": ("FG823", {}, {"torch_compile": True, "torch_compile_backend": "induktor"}),
}


@pytest.mark.parametrize(("code", "parts", "given"), BAD.values(), ids=BAD)
def test_a_mistake_is_one_line_with_a_hint(settings, code, parts, given):
    with pytest.raises(TrainingError) as caught:
        Trainer(**{"model": tiny_llama(), "train_dataset": rows(), **parts}, args=settings(**given)).train()
    assert code == caught.value.code
    assert "\n" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("callback", "hint"),
    [
        ("callbacks.py:Shout", "write !singleton:callbacks.py:Shout"),
        (functools.partial(Recorder), "write !singleton in its place"),
    ],
)
def test_what_a_config_gives_in_place_of_a_callback_is_told_how_to_write_it(settings, callback, hint):
    with pytest.raises(TrainingError, match=r"FG815.*is not a callback") as caught:
        Trainer(tiny_llama(), settings(), train_dataset=rows(), callbacks=[callback])
    assert hint in caught.value.hint


def test_an_iterable_that_ends_for_good_is_an_error(settings):
    class Once(torch.utils.data.IterableDataset):
        def __init__(self):
            self.rows = iter(regression_rows())

        def __iter__(self):
            return self.rows

    with pytest.raises(TrainingError, match=r"FG803.*no rows in epoch 1"):
        Trainer(Regression(), settings(max_steps=6), train_dataset=Once()).train()


def test_layers_that_nobody_can_tell_apart_cannot_be_recomputed(settings):
    with pytest.raises(TrainingError, match=r"FG822.*Linear has no nn.ModuleList"):
        Trainer(nn.Linear(2, 2), settings(gradient_checkpointing=True))


def test_an_output_folder_that_cannot_be_written_is_found_before_the_first_step(settings, tmp_path):
    (tmp_path / "file").write_text("in the way")
    recorder = Recorder()
    args = settings(save_strategy="epoch", output_dir=str(tmp_path / "file" / "out"))
    with pytest.raises(TrainingError, match=r"FG817.*cannot be written to"):
        Trainer(tiny_llama(), args, train_dataset=rows(), callbacks=[recorder]).train()
    assert [("on_init_end", 0)] == recorder.events


def test_several_processes_are_refused(settings, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match=r"FG703.*there are 2 \(this is rank 1\)"):
        Trainer(tiny_llama(), settings())


def test_a_callback_that_is_not_there_cannot_be_removed(settings):
    trainer = Trainer(tiny_llama(), settings(), callbacks=[Recorder])
    assert isinstance(trainer.remove_callback(Recorder), Recorder)
    trainer.add_callback(Recorder)
    assert ["Recorder"] == [type(callback).__name__ for callback in trainer.callbacks]
    with pytest.raises(TrainingError, match=r"FG815.*no callback 'At' to remove"):
        trainer.remove_callback(At)


def test_an_exception_in_a_callback_passes_through_with_its_place(settings):
    def fail():
        raise LookupError("mine")

    trainer = Trainer(tiny_llama(), settings(), train_dataset=rows(), callbacks=[At(2, fail)])
    with pytest.raises(LookupError, match="mine") as caught:
        trainer.train()
    assert ["in the callback At.on_step_end, step 2"] == caught.value.__notes__


def test_ctrl_c_ends_the_step_saves_says_where_and_goes_on_exactly(settings, caplog):
    def make(*callbacks):
        args = settings(save_strategy="epoch", num_train_epochs=2, lr_scheduler_type="cosine")
        return Trainer(tiny_llama(attention_dropout=0.1), args, train_dataset=rows(), callbacks=callbacks)

    whole = make()
    whole.train()
    for _, folder in list_checkpoints(Path(whole.args.output_dir)):
        os.rename(folder, folder.with_name(f"kept-{folder.name}"))
    recorder, before = Recorder(), signal.getsignal(signal.SIGINT)
    stopped = make(At(3, lambda: os.kill(os.getpid(), signal.SIGINT)), recorder)
    with pytest.raises(KeyboardInterrupt) as caught:
        stopped.train()
    assert before is signal.getsignal(signal.SIGINT)
    assert ("on_save", 3) in recorder.events and ("on_train_end", 3) == recorder.events[-1]
    (found,) = list_checkpoints(Path(whole.args.output_dir))
    assert (3, 3) == (found[0], verify(found[1]).step)
    assert [f"the state of step 3 is saved in {found[1]}"] == caught.value.__notes__
    assert ["stopping; press Ctrl-C again to stop at once"] == [
        r.getMessage() for r in caplog.records if r.name == "forgather.interrupt"
    ]
    resumed = make()
    resumed.train("auto")
    assert_same_weights(weights(whole.model), weights(resumed.model))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_the_run_as_ctrl_c_does(settings, number):
    args = settings(save_strategy="epoch")
    stopped = Trainer(tiny_llama(), args, train_dataset=rows(), callbacks=[At(2, lambda: os.kill(os.getpid(), number))])
    with pytest.raises(KeyboardInterrupt) as caught:
        stopped.train()
    assert signal.SIGTERM == caught.value.signal_number
    assert signal.SIG_DFL is signal.getsignal(signal.SIGTERM)
    assert [2] == [step for step, _ in list_checkpoints(Path(args.output_dir))]


def test_ctrl_c_on_a_full_disk_says_that_the_state_is_lost(settings, caplog):
    args, recorder = settings(save_strategy="epoch"), Recorder()

    def interrupt():
        Path(args.output_dir).rmdir()
        Path(args.output_dir).write_text("in the way")
        os.kill(os.getpid(), signal.SIGINT)

    trainer = Trainer(tiny_llama(), args, train_dataset=rows(), callbacks=[At(2, interrupt), recorder])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "interrupted at step 2, and its state is lost: [FG609]" in caplog.text
    assert ("on_train_end", 2) == recorder.events[-1]


def test_a_callback_that_fails_while_ctrl_c_saves_takes_nothing_from_the_others(settings):
    class Failing(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise LookupError("mine")

    recorder = Recorder()
    stop = At(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    trainer = Trainer(
        tiny_llama(), settings(save_strategy="epoch"), train_dataset=rows(), callbacks=[stop, Failing(), recorder]
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert ["saving failed too: LookupError('mine')"] == caught.value.__notes__
    assert ("on_train_end", 2) == recorder.events[-1]
    assert 2 == verify(list_checkpoints(Path(trainer.args.output_dir))[0][1]).step


@pytest.mark.parametrize(
    ("kind", "code"), [(CheckpointError, "FG600"), (DistributedError, "FG700"), (TrainingError, "FG800")]
)
def test_each_family_of_errors_has_a_code_of_its_own_and_survives_pickling(kind, code):
    with pytest.raises(kind, match=code) as caught:
        raise pickle.loads(pickle.dumps(kind("found", hint="do")))
    assert ("found", "do") == (caught.value.message, caught.value.hint)


def test_ctrl_c_reaches_loader_workers_without_failing_the_step(settings):
    class Interrupting(Rows):
        def __getitem__(self, index):
            worker = torch.utils.data.get_worker_info()
            os.kill(os.getpid(), signal.SIGINT) if worker is not None else None
            return super().__getitem__(index)

    args = settings(dataloader_num_workers=1)
    assert 4 == Trainer(Regression(), args, train_dataset=Interrupting()).train().global_step


def test_a_tokenizer_that_writes_folders_is_saved_twice(settings, tmp_path):
    class Processor:
        def save_pretrained(self, folder):
            (Path(folder) / "templates").mkdir()
            (Path(folder) / "templates" / "chat.jinja").write_text("x")

    trainer = Trainer(Regression(), settings(), processing_class=Processor())
    for _ in range(2):
        trainer.save_model(tmp_path / "model")
    assert "x" == (tmp_path / "model" / "templates" / "chat.jinja").read_text()


def test_ctrl_c_without_saving_writes_nothing(settings):
    args = settings()
    trainer = Trainer(
        tiny_llama(), args, train_dataset=rows(), callbacks=[At(2, lambda: os.kill(os.getpid(), signal.SIGINT))]
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not Path(args.output_dir).exists()


def test_a_second_ctrl_c_stops_at_once(settings):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.5 * SAME_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)

    recorder = Recorder()
    trainer = Trainer(tiny_llama(), settings(), train_dataset=rows(), callbacks=[At(2, twice), recorder])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert ("on_step_end", 2) not in recorder.events


def test_the_trainer_keeps_the_numbers_of_a_run(settings):
    output = Trainer(tiny_llama(), settings(), train_dataset=rows()).train()
    assert 4 == output.global_step
    assert math.isfinite(output.training_loss) and output.training_loss == output.metrics["train_loss"]
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second"} <= set(output.metrics)


def test_numpy_rows_are_trained_on(settings):
    data = [{"x": np.ones(4, dtype=np.float32) * n, "y": np.float32(n)} for n in range(8)]
    assert 4 == Trainer(Regression(), settings(), train_dataset=data).train().global_step


@pytest.mark.parametrize(("vocab_size", "length"), [(32, 12), (64, 40)])
def test_ids_or_rows_beyond_the_model_are_told_with_both_sizes(settings, vocab_size, length):
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **shape))
    data = rows(length=length)
    data[0]["input_ids"][0] = 63
    with pytest.raises(IndexError) as caught:
        Trainer(model, settings(train_sampling_strategy="sequential"), train_dataset=data).train()
    told = f"the batch has token ids up to 63 in rows of {length}; the model has {vocab_size} tokens and 32 positions"
    assert [told] == caught.value.__notes__
