"""Hooks of transformers' `Trainer` in a subclass of ours: called as transformers calls them, or refused by name."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from forgather.errors import TrainingError
from forgather.ml import AccelTrainer, PipelineTrainer, Trainer
from forgather.ml.trainer.hf import HFTrainer
from forgather.trainer_hooks import trainer_hooks
from tests.ml.fixtures import Recorder, Regression, regression_rows, rows, tiny_llama, weights

HOOKS = trainer_hooks()
THEIRS = sorted(name for name in vars(transformers.Trainer) if not name.startswith("__"))


def derived(kind, **members):
    return type("Mine", (kind,), members)


def called(name):
    def method(self, *args, **kwargs):
        raise RuntimeError(f"{name} is called")

    return method


def test_every_hook_of_transformers_has_its_place_in_the_table():
    assert [] == [name for name in THEIRS if (name in HOOKS.honored) == (name in HOOKS.instead)]


def test_what_is_honored_is_there():
    assert set() == {name for name in HOOKS.honored if not hasattr(Trainer, name)}


@pytest.mark.parametrize("kind", [Trainer, AccelTrainer, PipelineTrainer])
def test_a_hook_that_is_never_called_is_refused_when_the_class_is_used(kind):
    found = {}
    for name in HOOKS.instead:
        with pytest.raises(TrainingError) as caught:
            derived(kind, **{name: called(name)})(nn.Linear(2, 1))
        found[name] = caught.value.code, caught.value.hint.startswith(f"{HOOKS.instead[name]}; or extend trainers/hf_")
    assert {name: ("FG860", True) for name in HOOKS.instead} == found


def test_all_that_is_refused_is_told_at_once_of_mixins_too():
    class Mixin:
        def create_optimizer(self):
            pass

    with pytest.raises(TrainingError) as caught:
        type("Mine", (Mixin, Trainer), {"training_step": called("x")})(nn.Linear(2, 1))
    assert "Mine defines 'training_step', a hook of transformers' Trainer that forgather.ml:Trainer never calls" == str(
        caught.value.message
    )
    assert ["Mixin defines 'create_optimizer'"] == [one.message.split(",")[0] for one in caught.value.others]


def test_a_hook_that_is_set_on_the_object_is_refused_where_it_trains(settings):
    for name in ("training_step", "compute_loss"):
        trainer = Trainer(Regression(), settings(), train_dataset=regression_rows())
        setattr(trainer, name, called(name))
        with pytest.raises(TrainingError, match=f"'{name}'") as caught:
            trainer.train()
        assert "FG860" == caught.value.code


@pytest.mark.parametrize("name", ["compute_loss", "loss_is_scaled_for_ga"])
def test_a_pipeline_refuses_a_loss_of_the_whole_model(name):
    with pytest.raises(TrainingError, match="forgather.ml:PipelineTrainer never calls") as caught:
        derived(PipelineTrainer, **{name: False})(nn.Linear(2, 1))
    assert "FG861" == caught.value.code


@pytest.mark.parametrize("name", ["train", "save_model", "add_callback", "remove_callback", "compute_loss"])
def test_a_hook_that_is_honored_is_called(name, settings):
    mine = derived(Trainer, **{name: called(name)})
    trainer = mine(Regression(), settings(save_strategy="epoch", max_steps=1), train_dataset=regression_rows())
    with pytest.raises(RuntimeError, match=f"{name} is called"):
        if name.endswith("_callback"):
            getattr(trainer, name)(Recorder())
        trainer.train()


@pytest.mark.parametrize("name", ["training_step", "create_optimizer", "get_train_dataloader", "log", "compute_loss"])
def test_the_trainer_of_transformers_calls_all_of_them(name, tmp_path):
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1
    )
    mine = derived(HFTrainer, **{name: called(name)})
    with pytest.raises(RuntimeError, match=f"{name} is called"):
        mine(tiny_llama(), args, train_dataset=rows()).train()


def token_loss(logits, labels, items):
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
    total = F.cross_entropy(*flat, ignore_index=-100, reduction="mean" if items is None else "sum")
    return total if items is None else total / items


def dividing(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = token_loss(outputs.logits, labels, num_items_in_batch)
    return (loss, outputs) if return_outputs else loss


def mean(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = token_loss(outputs.logits, labels, None)
    return (loss, outputs) if return_outputs else loss


def handing_on(self, model, inputs, return_outputs=False, **kwargs):
    loss, outputs = super(type(self), self).compute_loss(model, inputs, return_outputs=True, **kwargs)
    return (2 * loss, outputs) if return_outputs else 2 * loss


def trained(kind, args, method, **members):
    recorder = Recorder()
    mine = derived(kind, **({"compute_loss": method} if method else {}), **members)
    data = rows(12)
    trainer = mine(
        tiny_llama(),
        args,
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[recorder],
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    losses = [line["loss"] for line in recorder.lines if "loss" in line]
    evaluated = [line["eval_loss"] for line in recorder.lines if "eval_loss" in line]
    return losses, evaluated, weights(trainer.model)


COMMON = {"max_steps": 3, "logging_steps": 1, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
COMMON |= {"use_cpu": True, "save_strategy": "no", "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
COMMON |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
COMMON |= {"train_sampling_strategy": "sequential"}


@pytest.mark.parametrize(
    ("method", "members"),
    [(dividing, {}), (mean, {"loss_is_scaled_for_ga": False}), (handing_on, {})],
    ids=["divides", "mean", "hands-on"],
)
def test_the_result_is_that_of_transformers_with_accumulation_and_uneven_targets(method, members, settings, tmp_path):
    theirs = transformers.TrainingArguments(str(tmp_path / "hf"), report_to=[], disable_tqdm=True, **COMMON)
    expected = trained(transformers.Trainer, theirs, method, **members)
    # What is said about a mean is seen here.
    actual = trained(Trainer, settings(**{**COMMON, "logging_strategy": "steps"}), method)

    assert expected[0] == pytest.approx(actual[0], abs=1e-5)
    assert all(torch.allclose(expected[2][name], actual[2][name], atol=2e-6) for name in expected[2])
    if method is mean:
        assert expected[1] == pytest.approx(actual[1], abs=1e-5)


def test_a_loss_divided_by_all_targets_does_not_depend_on_the_batches_and_is_that_of_the_trainer(settings):
    base = trained(Trainer, settings(**{**COMMON, "logging_strategy": "steps"}), None)
    other = {**COMMON, "logging_strategy": "steps", "gradient_accumulation_steps": 1, "per_device_train_batch_size": 6}
    other["per_device_eval_batch_size"] = 8
    for args in (settings(**{**COMMON, "logging_strategy": "steps"}), settings(**other)):
        found = trained(Trainer, args, dividing)
        assert base[0] == pytest.approx(found[0], abs=1e-6)
        assert base[1] == pytest.approx(found[1], abs=1e-6)
    twice = trained(Trainer, settings(**{**COMMON, "logging_strategy": "steps"}), handing_on)
    assert 2 * base[0][0] == pytest.approx(twice[0][0], abs=1e-5)


def ignores(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    seen = num_items_in_batch
    del seen
    return mean(self, model, inputs, return_outputs)


def uses_item(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = token_loss(outputs.logits, labels, num_items_in_batch.item())
    return (loss, outputs) if return_outputs else loss


def test_a_number_that_is_read_off_counts_as_used(settings):
    args = settings(**{**COMMON, "logging_strategy": "steps"})
    assert trained(Trainer, args, dividing)[0] == trained(Trainer, args, uses_item)[0]


def test_what_cannot_be_told_is_refused_before_anything_changes_and_can_be_said(settings):
    args = settings(**{**COMMON, "logging_strategy": "steps"})
    with pytest.raises(TrainingError, match="does not depend on it") as caught:
        trained(Trainer, args, ignores)
    assert "FG862" == caught.value.code
    said = trained(Trainer, args, ignores, loss_is_scaled_for_ga=False)
    assert trained(Trainer, args, mean)[0] == said[0]


@pytest.mark.parametrize("result", [None, torch.zeros(2), "loss"])
def test_a_result_that_is_no_loss_is_refused(result, settings):
    with pytest.raises(TrainingError, match="which is not a loss") as caught:
        trained(Trainer, settings(**COMMON), lambda self, model, inputs, return_outputs=False: result)
    assert "FG863" == caught.value.code


def test_a_method_may_take_what_it_reads_out_of_its_inputs(settings):
    def takes_out(self, model, inputs, return_outputs=False):
        return F.mse_loss(model(inputs.pop("input")).squeeze(-1), inputs.pop("labels"))

    def reads(self, model, inputs, return_outputs=False):
        return F.mse_loss(model(inputs["input"]).squeeze(-1), inputs["labels"])

    def losses(method):
        torch.manual_seed(0)
        recorder, model = Recorder(), nn.Linear(4, 1)
        data = [{"input": row["x"], "labels": row["y"]} for row in regression_rows(12)]
        mine = derived(Trainer, compute_loss=method)
        args = settings(**{**COMMON, "logging_strategy": "steps"})
        mine(model, args, train_dataset=data, eval_dataset=data[:3], callbacks=[recorder]).train()
        found = [line.get("loss", line.get("eval_loss")) for line in recorder.lines]
        return [value for value in found if value is not None]

    assert 4 == len(losses(reads))
    assert losses(reads) == losses(takes_out)


def test_the_cache_is_off_while_the_loss_is_computed_and_as_it_was_afterwards(settings):
    seen = []

    def method(self, model, inputs, return_outputs=False):
        seen.append(model.config.use_cache)
        return mean(self, model, inputs, return_outputs)

    model = tiny_llama()
    model.config.use_cache = True
    mine = derived(Trainer, compute_loss=method)
    mine(model, settings(max_steps=1), train_dataset=rows()).train()
    assert ({False}, True) == (set(seen), model.config.use_cache)


def model_divides(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
    return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_a_compiled_model_that_divides_by_itself_is_seen_to_do_so(settings):
    args = settings(**{**COMMON, "logging_strategy": "steps", "max_steps": 1, "eval_strategy": "no"})
    plain = trained(Trainer, args, dividing)
    compiled = settings(
        **{**COMMON, "logging_strategy": "steps", "max_steps": 1, "eval_strategy": "no"},
        torch_compile=True,
        torch_compile_backend="eager",
    )
    assert plain[0] == pytest.approx(trained(Trainer, compiled, model_divides)[0], abs=1e-5)


def test_the_signature_is_that_of_transformers():
    theirs, ours = (inspect.signature(kind.compute_loss) for kind in (transformers.Trainer, Trainer))
    assert list(theirs.parameters) == list(ours.parameters)


def test_the_documentation_shows_the_table():
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    public = {name: hint for name, hint in HOOKS.instead.items() if not name.startswith("_")}
    missing = [name for name, hint in public.items() if not re.search(rf"\|.*`{name}`.*\| {re.escape(hint)} \|", page)]
    assert [] == missing


class TwoNumbers(nn.Module):
    """A regression of two numbers a row that has its loss itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        loss = None if labels is None else F.mse_loss(logits, labels)
        return transformers.utils.ModelOutput(loss=loss, logits=logits) if loss is not None else {"logits": logits}


def squares(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")
    logits = model(**inputs)["logits"]
    loss = F.mse_loss(logits, labels, reduction="mean" if num_items_in_batch is None else "sum")
    loss = loss if num_items_in_batch is None else loss / num_items_in_batch
    return (loss, {"logits": logits}) if return_outputs else loss


def own_of_model(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    return super(type(self), self).compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize("method", [squares, own_of_model])
def test_items_are_the_numbers_of_a_regression(method, settings):
    generator = torch.Generator().manual_seed(3)
    data = [{"x": torch.randn(4, generator=generator), "labels": torch.randn(2, generator=generator)} for _ in range(6)]
    recorder, model = Recorder(), TwoNumbers()
    x, y = torch.stack([row["x"] for row in data]), torch.stack([row["labels"] for row in data])
    expected = float(F.mse_loss(model.layer(x), y).detach())
    args = settings(per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_strategy="steps",
                    logging_steps=1, eval_strategy="epoch", learning_rate=0.0)  # fmt: skip
    trainer = derived(Trainer, compute_loss=method)(
        model, args, train_dataset=data, eval_dataset=data, callbacks=[recorder]
    )
    trainer.train()
    (loss,) = [line["loss"] for line in recorder.lines if "loss" in line]
    (evaluated,) = [line["eval_loss"] for line in recorder.lines if "eval_loss" in line]
    assert [expected, expected] == pytest.approx([loss, evaluated], rel=1e-5)
