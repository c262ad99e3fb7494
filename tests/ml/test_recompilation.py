"""Compiled models are compiled in the warm-up only; what is compiled later is counted, with its reason."""

import logging

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import forgather.ml as ml
from forgather.ml.train_mode import sampling_mode
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.model_setup import preparation
from forgather.ml.trainer.recompilation import Recompilations
from tests.ml.fixtures import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


FILLERS = {"input_ids": 0, "labels": -100}


def padded(rows):
    longest = max(len(row["labels"]) for row in rows)
    columns = {
        name: [row[name] + [fill] * (longest - len(row[name])) for row in rows] for name, fill in FILLERS.items()
    }
    return {name: torch.tensor(values) for name, values in columns.items()}


def rows(*lengths):
    return [{"input_ids": [5 + n % 7] * length, "labels": [5 + n % 7] * length} for n, length in enumerate(lengths)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Blocks(nn.Module):
    """Two blocks of one class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    model, counter = Blocks(), Recompilations(enabled=True)
    for block in model.blocks:
        block.compile(backend="eager")
    yield model, counter
    counter.close()
    torch._dynamo.reset()


def call(model, rows, dtype=torch.float32, **options):
    return model.to(dtype)(torch.ones(rows, 4, dtype=dtype, requires_grad=True))


def test_warm_up_is_not_counted_and_later_compilations_are_named(compiled, caplog):
    model, counter = compiled
    call(model, 5)
    counter.end_step(0)
    for number in (6, 7, 9):  # compiled once more, for all sizes
        call(model, number)
        counter.end_step(1)
    with torch.no_grad():
        call(model, 7)  # compiled once for evaluation
    counter.end_step(2)
    assert {"recompilations": 0} == counter.metrics()
    with caplog.at_level(logging.WARNING):
        call(model, 7, torch.float64)
        counter.end_step(3)
    assert {"recompilations": 1} == counter.metrics()
    (told,) = [record.getMessage() for record in caplog.records if "[FG713]" in record.getMessage()]
    assert "was compiled again in step 3: " in told and "0/3: " in told


class Masked(nn.Module):
    """A block that computes something else where there is no mask."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, attention_mask=None):
        return self.linear(x if attention_mask is None else x * attention_mask)


@pytest.mark.parametrize("first", [None, torch.ones(4)], ids=["without a mask", "with a mask"])
def test_batches_with_and_without_a_mask_are_two_kinds_of_which_each_is_compiled_once(first, caplog):
    torch._dynamo.reset()
    counter, block = Recompilations(enabled=True), Masked()
    block.compile(backend="eager")
    second = torch.ones(4) if first is None else None
    try:
        for step, mask in enumerate([first, second, first, second]):
            block(torch.ones(2, 4), attention_mask=mask)
            counter.end_step(step)
        assert {"recompilations": 0} == counter.metrics()
        with caplog.at_level(logging.WARNING):
            block(torch.ones(2, 4), attention_mask=torch.ones(4, requires_grad=True))
            counter.end_step(4)
        assert {"recompilations": 1} == counter.metrics()
        (told,) = [record.getMessage() for record in caplog.records if "[FG713]" in record.getMessage()]
        assert "\n" not in told and " # " not in told, "one line, without the stack of the model"
    finally:
        counter.close()
        torch._dynamo.reset()


def test_nothing_is_counted_without_compilation_or_after_the_run(compiled):
    model, counter = compiled
    assert {} == Recompilations(enabled=False).metrics()
    call(model, 5)
    counter.end_step(0)
    counter.close()
    call(model, 5, torch.float64)
    counter.end_step(1)
    assert (0, {}) == (counter.count, counter.metrics())


def test_blocks_are_compiled_by_default_and_the_whole_model_by_name(tmp_path):
    args = TrainingArguments(tmp_path, torch_compile=True)
    assert (True, None) == (args.torch_compile, args.torch_compile_regions)
    assert not TrainingArguments(tmp_path, torch_compile_regions=False).torch_compile
    assert TrainingArguments(tmp_path, torch_compile_regions=True).torch_compile
    for regions in (None, False):
        model = tiny_llama()
        settings = {"torch_compile": True, "torch_compile_backend": "eager", "torch_compile_regions": regions}
        for step in preparation(TrainingArguments(tmp_path, **settings)):
            step(model)
        assert (model._compiled_call_impl is None) == (regions is None)
        assert all((layer._compiled_call_impl is None) == (regions is False) for layer in model.model.layers)


@pytest.mark.matrix
def test_a_training_with_rows_of_all_lengths_evaluation_and_texts_compiles_nothing_again(tmp_path):
    torch._dynamo.reset()
    logs = []

    class Kept(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            logs.append(dict(kwargs["logs"]))

        def on_evaluate(self, args, state, control, **kwargs):
            with trainer.strategy.generating() as model:
                model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False, pad_token_id=0)

    settings = {"torch_compile": True, "torch_compile_backend": "eager", "logging_steps": 1, "eval_steps": 2}
    args = TrainingArguments(
        tmp_path, use_cpu=True, max_steps=6, save_strategy="no", eval_strategy="steps",
        per_device_train_batch_size=2, report_to=[], **settings,
    )  # fmt: skip
    trainer = ml.Trainer(
        tiny_llama(num_hidden_layers=1), args, callbacks=[Kept()], data_collator=padded, eval_dataset=rows(9, 7),
        train_dataset=rows(8, 8, 9, 5, 11, 12, 13, 7, 6, 6, 10, 9),
    )  # fmt: skip
    trainer.train()
    assert [0] * 7 == [line["recompilations"] for line in logs if "recompilations" in line]


def test_texts_that_are_written_during_a_training_are_not_compiled():
    torch._dynamo.reset()
    graphs = []
    model = tiny_llama(num_hidden_layers=1)
    model.model.layers[0].compile(backend=lambda graph, _: graphs.append(graph) or graph)
    ids = torch.tensor([[5, 6, 7]])
    with sampling_mode(model, 0):
        for length in (2, 3, 5):
            model.generate(ids, max_new_tokens=length, do_sample=False, pad_token_id=0, attention_mask=ids != 0)
    assert [] == graphs
    model(ids)
    assert 1 == len(graphs)
    torch._dynamo.reset()
