"""The trainer against loops of a few lines that share nothing with it but the seed of an epoch."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from forgather.ml import Trainer
from forgather.ml.trainer.batch_sampler import epoch_seed
from forgather.ml.trainer.model_setup import compile_model
from tests.ml.fixtures import (
    Regression,
    assert_same_weights,
    largest_difference,
    regression_rows,
    rows,
    tiny_llama,
    weights,
)


def adamw(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def stack(batch):
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


def plain_loop(model, data, *, batch_size, accumulation, epochs, lr, seed, shift=1):
    """Trains without a trainer: the divisor is the number of targets of the whole update."""
    torch.manual_seed(seed)
    optimizer = adamw(model.parameters(), lr)
    steps = math.ceil(math.ceil(len(data) / batch_size) / accumulation) * epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (steps - step) / max(1, steps)))
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch_seed(seed, epoch))).tolist()
        batches = [stack([data[i] for i in order[at : at + batch_size]]) for at in range(0, len(data), batch_size)]
        for at in range(0, len(batches), accumulation):
            window = batches[at : at + accumulation]
            targets = sum(int((batch["labels"][:, shift:] != -100).sum()) for batch in window)
            total = 0.0
            for batch in window:
                logits = model(input_ids=batch["input_ids"], use_cache=False).logits
                flat, labels = logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1)
                loss = F.cross_entropy(flat, labels, reduction="sum") / targets
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(total)
    return losses


def train(settings, model, data, **given):
    trainer = Trainer(model, settings(**given), train_dataset=data, optimizer_factory=lambda p, lr: adamw(p, lr))
    return trainer.train()


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_the_trainer_equals_a_plain_loop_bit_for_bit(settings, accumulation):
    expected, actual = tiny_llama(attention_dropout=0.1), tiny_llama(attention_dropout=0.1)
    losses = plain_loop(expected.train(), rows(), batch_size=2, accumulation=accumulation, epochs=3, lr=1e-2, seed=7)
    output = train(settings, actual, rows(), gradient_accumulation_steps=accumulation, num_train_epochs=3, seed=7)
    assert_same_weights(weights(expected), weights(actual))
    assert sum(losses) / len(losses) == pytest.approx(output.training_loss, rel=1e-6)


def test_a_plain_loop_with_another_divisor_is_told_apart(settings):
    expected, actual = tiny_llama(), tiny_llama()
    plain_loop(expected.train(), rows(), batch_size=2, accumulation=2, epochs=1, lr=1e-2, seed=7, shift=0)
    train(settings, actual, rows(), gradient_accumulation_steps=2, seed=7)
    assert largest_difference(weights(expected), weights(actual)) > 1e-6


def test_a_plain_module_equals_its_plain_loop_bit_for_bit(settings):
    expected, actual, data = Regression(), Regression(), regression_rows()
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch_seed(3, 0))).tolist()
    for at in range(0, 8, 2):
        batch = stack([data[i] for i in order[at : at + 2]])
        (expected(**batch) * 2 / 2).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    args = settings(learning_rate=0.1, lr_scheduler_type="constant", seed=3)
    Trainer(actual, args, train_dataset=data, optimizer_factory=torch.optim.SGD).train()
    assert_same_weights(weights(expected), weights(actual))


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 4), (4, 2), (1, 8)])
def test_accumulation_does_not_change_the_weights(settings, batch_size, accumulation):
    # In float64: sums in another order differ by rounding, which Adam divides by a gradient that may be as small.
    expected, actual = tiny_llama().double(), tiny_llama().double()
    shared = {"num_train_epochs": 4, "learning_rate": 1e-3}
    split = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    train(settings, expected, rows(), per_device_train_batch_size=8, **shared)
    train(settings, actual, rows(), **split, **shared)
    assert largest_difference(weights(expected), weights(actual)) < 1e-9


def test_the_short_tail_of_an_epoch_is_exact(settings):
    """Eight micro-batches of one row and five a step: the tail has three, and is not divided by five."""
    expected, actual = tiny_llama().double(), tiny_llama().double()
    order = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant", "learning_rate": 1e-3}
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 5, "num_train_epochs": 2}
    train(settings, actual, rows(), **split, **order)
    optimizer = adamw(expected.parameters(), 1e-3)
    for _ in range(2):
        for at in (0, 5):
            batch = stack(rows()[at : at + 5])
            logits = expected.train()(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
            F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1)).backward()
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(weights(expected), weights(actual)) < 1e-9


def scheduled_loop(model, windows, lr):
    """Trains on given windows, each a list of batches of rows; the schedule of the rate ends with the last of them."""
    torch.manual_seed(7)
    optimizer, count = adamw(model.train().parameters(), lr), len(windows)
    rate = [0.0, 0.5, *((count - step) / (count - 2) for step in range(2, count + 1))]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate[step])
    for window in windows:
        targets = sum(int((row["labels"][1:] != -100).sum()) for batch in window for row in batch)
        for batch in map(stack, window):
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
            labels = batch["labels"][:, 1:].reshape(-1)
            (F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels, reduction="sum") / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


# Micro-batches of each step, by hand: an epoch of 13 rows has seven micro-batches of two rows.
SCHEDULES = [
    ({0: 4, 1: 3, 2: 1}, [[4, 3], [3, 3, 1], [1] * 7]),
    ({"steps": {0: 1, 3: 2, 6: 5}}, [[1, 1, 1, 2, 2], [2, 5], [5, 2]]),
]


def windows_of(data, sizes):
    for epoch, counts in enumerate(sizes):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch_seed(7, epoch))).tolist()
        batches = iter([[data[i] for i in order[at : at + 2]] for at in range(0, len(data), 2)])
        yield from ([next(batches) for _ in range(count)] for count in counts)


@pytest.mark.parametrize(("schedule", "sizes"), SCHEDULES)
def test_scheduled_accumulation_equals_a_plain_loop_bit_for_bit(settings, schedule, sizes):
    expected, actual, data = tiny_llama(), tiny_llama(), rows(13)
    windows = list(windows_of(data, sizes))
    scheduled_loop(expected, windows, 1e-2)
    given = {"accumulate_grad_batches": schedule, "num_train_epochs": 3, "seed": 7, "warmup_steps": 2}
    output = train(settings, actual, data, **given)
    assert len(windows) == output.global_step
    assert_same_weights(weights(expected), weights(actual))


def test_a_constant_accumulation_is_told_apart_from_a_schedule(settings):
    expected, actual, data = tiny_llama(), tiny_llama(), rows(13)
    scheduled_loop(expected, list(windows_of(data, SCHEDULES[0][1])), 1e-2)
    train(settings, actual, data, gradient_accumulation_steps=4, num_train_epochs=3, seed=7)
    assert largest_difference(weights(expected), weights(actual)) > 1e-6


@pytest.mark.parametrize("batch_size", [1, 3, 5, 8])
def test_the_evaluation_loss_does_not_depend_on_the_batch_size(settings, batch_size):
    model, data = tiny_llama(), rows()
    batch = stack(data)
    logits = model.eval()(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    expected = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1)).item()
    args = settings(per_device_eval_batch_size=batch_size, gradient_accumulation_steps=batch_size)
    assert expected == pytest.approx(Trainer(model, args, eval_dataset=data).evaluate()["eval_loss"], abs=1e-6)


def test_two_runs_of_one_configuration_are_equal(settings):
    first, second = tiny_llama(attention_dropout=0.2), tiny_llama(attention_dropout=0.2)
    outputs = [train(settings, model, rows()) for model in (first, second)]
    assert_same_weights(weights(first), weights(second))
    assert outputs[0].training_loss == outputs[1].training_loss


def test_another_seed_shuffles_in_another_order(settings):
    first, second = tiny_llama(), tiny_llama()
    train(settings, first, rows(), seed=1)
    train(settings, second, rows(), seed=2)
    assert largest_difference(weights(first), weights(second)) > 0


def test_gradient_checkpointing_changes_no_weight(settings):
    expected, actual = tiny_llama(attention_dropout=0.1), tiny_llama(attention_dropout=0.1)
    train(settings, expected, rows())
    train(settings, actual, rows(), gradient_checkpointing=True)
    assert_same_weights(weights(expected), weights(actual))


def test_gradient_checkpointing_of_a_plain_module_changes_no_weight(settings):
    expected, actual = Regression(), Regression()
    train(settings, expected, regression_rows())
    train(settings, actual, regression_rows(), gradient_checkpointing=True)
    assert_same_weights(weights(expected), weights(actual))


def test_gradient_checkpointing_does_recompute(settings):
    model, calls = Regression(), []
    model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    recomputed = copy.deepcopy(model)
    train(settings, model, regression_rows())
    once = len(calls)
    calls.clear()
    recomputed.layers[1].register_forward_hook(lambda *_: calls.append(1))
    train(settings, recomputed, regression_rows(), gradient_checkpointing=True)
    assert once < len(calls)


def test_compiling_changes_no_weight_beyond_rounding(settings):
    expected, actual = tiny_llama(), tiny_llama()
    train(settings, expected, rows())
    train(settings, actual, rows(), torch_compile=True, torch_compile_backend="eager")
    assert largest_difference(weights(expected), weights(actual)) < 1e-5
    assert list(weights(expected)) == list(weights(actual))


def test_compiling_the_blocks_alone_changes_no_weight_beyond_rounding(settings):
    expected, actual = tiny_llama(), tiny_llama()
    train(settings, expected, rows())
    train(settings, actual, rows(), torch_compile_regions=True, torch_compile_backend="eager")
    assert largest_difference(weights(expected), weights(actual)) < 1e-5
    assert list(weights(expected)) == list(weights(actual))
    assert actual._compiled_call_impl is None
    assert all(layer._compiled_call_impl is not None for layer in actual.model.layers)


def test_a_model_without_blocks_is_compiled_whole():
    model = torch.nn.Linear(4, 1)
    compile_model(model, backend="eager", mode=None, by_blocks=True)
    assert model._compiled_call_impl is not None


def test_bf16_keeps_weights_in_float32_and_comes_close(settings):
    expected, actual = tiny_llama(), tiny_llama()
    first = train(settings, expected, rows())
    second = train(settings, actual, rows(), bf16=True)
    assert {torch.float32} == {value.dtype for value in weights(actual).values()}
    assert first.training_loss == pytest.approx(second.training_loss, rel=2e-2)
    assert first.training_loss != second.training_loss
