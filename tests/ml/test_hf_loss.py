"""A `loss_fn` under `transformers.Trainer`: the numbers of our own trainer, and of a loop over all rows at once."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import TrainingArguments as HFArguments

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.losses import loss_rule
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.fixtures import Recorder, largest_difference, rows, tiny_llama, weights

WEIGHT = torch.tensor([1.0, 5.0, 0.5])
STEPS, ROWS = 3, 12


class Classifier(nn.Module):
    """A module whose forward knows of no labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


def class_rows(ignored=-100):
    generator = torch.Generator().manual_seed(1)
    made = [
        {"x": torch.randn(4, generator=generator), "labels": torch.randint(0, 3, (), generator=generator)}
        for _ in range(ROWS)
    ]
    made[5]["labels"] = torch.tensor(ignored)
    return made


def number_rows():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.randn(3, generator=generator)}] * ROWS


def focal(logits, labels, reduction="mean"):
    losses = F.cross_entropy(logits, labels, reduction="none")
    losses = (losses * (1 - (-losses).exp()))[labels != -100]
    return losses.sum() if reduction == "sum" else losses.mean()


def divided(logits, labels, num_items_in_batch=None):
    total = F.cross_entropy(logits, labels, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


class OwnModule(nn.Module):
    def forward(self, logits, labels, reduction="mean"):
        return focal(logits, labels, reduction)


LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "mean with weights": nn.CrossEntropyLoss(weight=WEIGHT),
    "sum with weights": nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"),
    "weights and smoothing": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
    "another ignored label": nn.CrossEntropyLoss(ignore_index=2),
    "partial with weights": functools.partial(F.cross_entropy, weight=WEIGHT),
    "own function": focal,
    "own function that divides": divided,
    "own module": OwnModule(),
    "elements": nn.MSELoss(),
}


def mean_of(loss_fn):
    """The user's loss as a loop calls it: its mean over all rows at once."""
    return nn.CrossEntropyLoss(weight=WEIGHT) if getattr(loss_fn, "reduction", "") == "sum" else loss_fn


def loop(model, loss_fn, batches):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        loss = mean_of(loss_fn)(*batch(model))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def of_rows(data, start, count):
    x, labels = (torch.stack([row[name] for row in data[start : start + count]]) for name in ("x", "labels"))
    return lambda model: (model(x), labels)


def trained(kind, folder, model, data, loss_fn, *, batch=4, accumulation=1, steps=STEPS, **given):
    settings = {
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": steps,
        "per_device_eval_batch_size": 5, "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    make, arguments = (Trainer, TrainingArguments) if kind == "ours" else (HFTrainer, HFArguments)
    args = arguments(str(folder), **settings, **({} if kind == "ours" else {"disable_tqdm": True}))
    for name, value in given.items():
        setattr(args, name, value)
    recorder = Recorder()
    trainer = make(model, args, train_dataset=data, eval_dataset=data, loss_fn=loss_fn, callbacks=[recorder])
    trainer.train()
    return trainer, [line["loss"] for line in recorder.lines if "loss" in line]


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_losses_and_weights_are_those_of_a_loop_and_of_our_trainer(tmp_path, loss_fn, batch, accumulation):
    data = number_rows() if isinstance(loss_fn, nn.MSELoss) else class_rows(getattr(loss_fn, "ignore_index", -100))
    expected = Classifier()
    losses = loop(expected, loss_fn, [of_rows(data, 4 * step, 4) for step in range(STEPS)])
    evaluated = mean_of(loss_fn)(*of_rows(data, 0, ROWS)(expected)).item()
    for kind in ("ours", "transformers"):
        model = Classifier()
        trainer, logged = trained(kind, tmp_path, model, data, loss_fn, batch=batch, accumulation=accumulation)
        assert losses == pytest.approx(logged, abs=1e-6), kind
        assert largest_difference(weights(expected), weights(model)) < 1e-6, kind
        assert evaluated == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6), kind


def test_a_causal_language_model_is_trained_on_the_next_label_by_both(tmp_path):
    weight = torch.linspace(0.1, 4, 64)
    both = [
        trained(
            kind, tmp_path, model := tiny_llama(), rows(), nn.CrossEntropyLoss(weight=weight), batch=2, accumulation=2
        )
        + (weights(model),)
        for kind in ("ours", "transformers")
    ]
    (ours, our_losses, our_weights), (theirs, their_losses, their_weights) = both
    assert our_losses == pytest.approx(their_losses, rel=1e-6)
    assert largest_difference(our_weights, their_weights) < 1e-6
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-6)


def test_copies_of_a_model_on_several_devices_change_nothing(tmp_path):
    def on_two(kind, **given):
        model = Classifier()
        trained(kind, tmp_path, model, class_rows(), LOSSES["mean with weights"], **given)
        return weights(model)

    assert largest_difference(on_two("ours"), on_two("transformers", _n_gpu=2, per_device_train_batch_size=2)) < 1e-6


def test_label_smoothing_that_no_loss_would_apply_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="FG807"):
        trained("transformers", tmp_path, Classifier(), class_rows(), focal, label_smoothing_factor=0.1)


@pytest.mark.parametrize(("model", "unit"), [(Classifier, "samples"), (tiny_llama, "tokens")])
def test_speed_is_that_of_samples_where_a_model_reads_no_language(tmp_path, model, unit):
    speeds = []

    class Speeds(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            speeds.append({name for name in logs if "per_second" in name})

    data = class_rows() if model is Classifier else rows()
    args = HFArguments(
        str(tmp_path), max_steps=2, logging_steps=1, include_num_input_tokens_seen="all", report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    HFTrainer(model(), args, train_dataset=data, loss_fn=nn.CrossEntropyLoss(), callbacks=[Speeds()]).train()
    assert [{f"{unit}_per_second", "steps_per_second"}] * 2 == [
        {name for name in line if not name.startswith("train_")} for line in speeds[:2]
    ]
    assert (unit == "tokens") == any("train_tokens_per_second" in line for line in speeds)


def hides_weights(logits, labels, reduction="mean"):
    return F.cross_entropy(logits, labels, weight=WEIGHT, reduction=reduction)


def drops_weights(logits, labels, reduction="mean"):
    return hides_weights(F.dropout(logits, 0.3), labels, reduction=reduction)


def ignores_reduction(logits, labels, reduction="mean"):
    return F.cross_entropy(logits, labels)


def ignores_items(logits, labels, num_items_in_batch=None):
    return F.cross_entropy(logits, labels)


class Focal(nn.CrossEntropyLoss):
    def forward(self, logits, labels):
        losses = F.cross_entropy(logits, labels, reduction="none")
        return (losses * (1 - (-losses).exp())).mean()


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (hides_weights, r"'hides_weights'.*its mean over the batch divides by \d.*the batch has 11 targets"),
        (ignores_reduction, "'ignores_reduction'.*the same with reduction"),
        (drops_weights, r"'drops_weights'.*its mean over the batch divides by \d.*the batch has 11 targets"),
        (Focal(), "'Focal'.*the same with reduction"),
        (ignores_items, "'ignores_items'.*its result is not a sum divided by it"),
        (functools.partial(ignores_items), "'ignores_items'.*its result is not a sum divided by it"),
    ],
)
def test_a_mean_that_divides_by_something_else_is_refused_at_the_first_batch(loss_fn, says):
    model, (_, labels) = Classifier(), of_rows(class_rows(), 0, ROWS)(Classifier())
    batch = {"x": torch.stack([row["x"] for row in class_rows()]), "labels": labels}
    with pytest.raises(TrainingError, match=f"FG806.*{says}"):
        loss_rule(model, loss_fn).total(model, batch)


def drops(logits, labels, reduction="mean"):
    return F.cross_entropy(F.dropout(logits, 0.3), labels, reduction=reduction)


def drops_items(logits, labels, num_items_in_batch=None):
    return drops(logits, labels, reduction="sum") / num_items_in_batch


def rounds(logits, labels, reduction="mean"):
    return F.cross_entropy(logits, labels, reduction=reduction).bfloat16()


@pytest.mark.parametrize(
    ("loss_fn", "sums", "tolerance"), [(drops, drops, 1e-6), (drops_items, drops, 1e-6), (rounds, rounds, 1e-2)]
)
def test_a_loss_that_draws_or_rounds_divides_by_its_targets_all_the_same(loss_fn, sums, tolerance):
    model, (_, labels) = Classifier(), of_rows(class_rows(), 0, ROWS)(Classifier())
    batch = {"x": torch.stack([row["x"] for row in class_rows()]), "labels": labels}
    rule = loss_rule(model, loss_fn)
    for seed in range(4):
        torch.manual_seed(seed)
        total = rule.total(model, batch).detach()
        torch.manual_seed(seed)
        expected = sums(model(batch["x"]), labels, reduction="sum").detach()
        assert float(total) == pytest.approx(float(expected), rel=tolerance)


def test_looking_at_a_loss_changes_neither_it_nor_what_is_drawn():
    class Counting(nn.Module):
        calls = 0

        def forward(self, logits, labels, reduction="mean"):
            self.calls += 1
            torch.rand(1)
            return F.cross_entropy(logits, labels, reduction=reduction)

    model, loss_fn = Classifier(), Counting()
    logits, labels = of_rows(class_rows(), 0, ROWS)(model)
    rule = loss_rule(model, loss_fn)
    torch.manual_seed(0)
    rule.total(lambda **_: logits, {"labels": labels})
    drawn = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(1)
    assert (1, True) == (loss_fn.calls, torch.equal(drawn, torch.rand(1)))


def packed(shift, *, masked=False, boundaries=True):
    """Rows of two documents, of which the second alone has labels and the first alone is changed."""
    made = []
    for row in rows(4):
        ids, labels = row["input_ids"].clone(), row["input_ids"].clone()
        ids[:6], labels[:7] = (ids[:6] + shift) % 64, -100
        made.append({"input_ids": ids, "labels": labels})
        if boundaries:
            made[-1]["position_ids"] = torch.tensor([*range(6)] * 2)
        if masked:
            made[-1]["attention_mask"] = torch.ones(12, dtype=torch.long)
    return made


def difference_by_the_first_document(folder, *, use_cache=False, **rows_are):
    losses, evaluated = [], []
    for shift in (0, 7):
        data = packed(shift, **rows_are)
        trainer, logged = trained(
            "transformers", folder, tiny_llama(), data, None, batch=2, steps=1, learning_rate=0.0, use_cache=use_cache
        )
        losses.append(logged[0])
        evaluated.append(trainer.evaluate()["eval_loss"])
    return abs(losses[0] - losses[1]), abs(evaluated[0] - evaluated[1])


@pytest.mark.parametrize("rows_are", [{}, {"masked": True}, {"use_cache": True}], ids=["plain", "masked", "cached"])
def test_documents_of_packed_rows_stay_apart(tmp_path, rows_are):
    assert max(difference_by_the_first_document(tmp_path, **rows_are)) < 1e-6


def test_documents_without_boundaries_mix_so_that_the_test_above_can_fail(tmp_path):
    assert min(difference_by_the_first_document(tmp_path, boundaries=False)) > 1e-4


def small(folder):
    return HFArguments(str(folder), max_steps=2, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)


def test_a_model_may_be_made_by_the_trainer(tmp_path):
    # Making the model sets the seed from which the order of rows would be drawn: another order is another rounding.
    settings = dataclasses.replace(small(tmp_path), data_seed=3)
    given = HFTrainer(tiny_llama(), settings, train_dataset=rows(8))
    made = HFTrainer(None, settings, train_dataset=rows(8), model_init=lambda: tiny_llama())
    assert given.train().training_loss == made.train().training_loss


def test_a_loss_that_is_given_twice_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="FG812.*'loss_fn' and as 'compute_loss_func'"):
        HFTrainer(tiny_llama(), small(tmp_path), loss_fn=F.cross_entropy, compute_loss_func=F.cross_entropy)
