"""A run that resumes from a checkpoint makes no initial weights: they are NaN until the checkpoint has replaced them."""

import functools

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from forgather.errors import CheckpointError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.models import from_pretrained
from tests.ml.fixtures import rows, tiny_llama

CONFIG = tiny_llama(num_hidden_layers=1).config


def make():
    return LlamaForCausalLM(CONFIG)


def trainer(folder, model=make, **settings):
    fixed = {"use_cpu": True, "per_device_train_batch_size": 4, "save_steps": 1, "save_strategy": "steps"}
    args = TrainingArguments(str(folder), **{"max_steps": 2, "learning_rate": 0.01, **fixed, **settings})
    return Trainer(model, args, train_dataset=rows(12), eval_dataset=rows(4))


def resumed(folder, model=make, **settings):
    return trainer(folder, model, resume_from_checkpoint=str(folder / "checkpoint-1"), **settings)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def are_equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def are_unset(trainer):
    found = {bool(parameter.isnan().all()) for parameter in trainer.model.parameters()}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("fills", ["sequential", "counter"])
def test_a_resumed_run_is_that_without_interruption(tmp_path, fills):
    whole = trainer(tmp_path, initial_weights=fills)
    assert not are_unset(whole)
    whole.train()
    # The control makes them, as releases before did.
    for skips in (True, False):
        again = resumed(tmp_path, initial_weights=fills, skip_initial_weights_on_resume=skips)
        assert are_unset(again) == skips
        # Buffers that no checkpoint has are computed.
        assert torch.equal(whole.model.model.rotary_emb.inv_freq, again.model.model.rotary_emb.inv_freq)
        again.train()
        assert are_equal(weights(whole), weights(again))
        facts = read_manifest(tmp_path / "checkpoint-2").facts
        assert ("counter-1" if fills == "counter" else None) == facts.get("initial_weights")


def test_a_loaded_model_is_not_read_before_a_resume(tmp_path):
    make().save_pretrained(tmp_path / "model")
    load = functools.partial(from_pretrained, tmp_path / "model")
    whole = trainer(tmp_path / "run", load)
    whole.train()
    again = resumed(tmp_path / "run", load)
    assert are_unset(again)
    again.train()
    assert are_equal(weights(whole), weights(again))


@pytest.mark.parametrize("use", ["evaluate", "predict", "save_model", "train"])
@pytest.mark.parametrize("fills", ["sequential", "counter"])
def test_what_needs_the_initial_weights_makes_them(tmp_path, use, fills):
    expected = weights(trainer(tmp_path, initial_weights=fills, max_steps=1))
    trainer(tmp_path, initial_weights=fills, max_steps=1).train()
    again = resumed(tmp_path, initial_weights=fills, save_strategy="no")
    calls = {
        "evaluate": again.evaluate,
        "predict": lambda: again.predict(rows(4)),
        "save_model": lambda: again.save_model(tmp_path / "saved"),
        # The request of the call takes precedence.
        "train": lambda: again.train(resume_from_checkpoint=False),
    }
    if use == "train":
        fresh = trainer(tmp_path / "fresh", initial_weights=fills, save_strategy="no")
        fresh.train()
        expected = weights(fresh)
    calls[use]()
    assert are_equal(expected, weights(again))


class Hiding(nn.Module):
    """A model whose state lacks one of its parameters, as by a mistake in a hook."""

    hides = True

    def __init__(self):
        super().__init__()
        self.inner = make()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, input_ids, labels=None, **others):
        found = self.inner(input_ids, labels=labels, **others)
        return type(found)(loss=found.loss, logits=found.logits * self.scale)

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        if self.hides:
            found.pop("scale")
        return found


class HidingLate(Hiding):
    """Hides it only after it was made, so that it is expected in the checkpoint."""

    hides = False


def test_a_weight_that_the_checkpoint_does_not_set_is_refused(tmp_path):
    trainer(tmp_path, Hiding).train()
    again = resumed(tmp_path, HidingLate)
    again.model.hides = True
    with pytest.raises(CheckpointError, match="'scale' has no value after the checkpoint was restored") as caught:
        again.train()
    assert caught.value.code == "FG748"
    # As the message says.
    kept = resumed(tmp_path, HidingLate, skip_initial_weights_on_resume=False)
    kept.model.hides = True
    kept.train()


def test_a_parameter_that_is_in_no_state_is_made(tmp_path):
    trainer(tmp_path, Hiding).train()
    again = resumed(tmp_path, Hiding)
    assert not again.model.scale.isnan().any()
    assert again.model.inner.lm_head.weight.isnan().all()
    again.train()


class Reading(nn.Module):
    """A model that cannot be made without values."""

    def __init__(self):
        super().__init__()
        self.inner = make()
        self.scale = self.inner.lm_head.weight.std().item()

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Keeping(nn.Module):
    """A model with a table that is in a list, where no part of torch finds it."""

    def __init__(self):
        super().__init__()
        self.inner = make()
        self.tables = [torch.zeros(1)]

    def forward(self, *args, **kwargs):
        found = self.inner(*args, **kwargs)
        return type(found)(loss=found.loss, logits=found.logits + self.tables[0])


class Drawing(nn.Module):
    """A model with random numbers that are in no checkpoint."""

    def __init__(self):
        super().__init__()
        self.inner = make()
        self.register_buffer("noise", torch.rand(1), persistent=False)

    def forward(self, *args, **kwargs):
        found = self.inner(*args, **kwargs)
        return type(found)(loss=found.loss, logits=found.logits + self.noise)


@pytest.mark.parametrize("model", [Reading, Keeping, Drawing])
def test_a_model_that_needs_values_is_made_with_them(tmp_path, model):
    whole = trainer(tmp_path, model)
    whole.train()
    again = resumed(tmp_path, model)
    assert not are_unset(again)
    again.train()
    assert are_equal(weights(whole), weights(again))


def test_nothing_to_resume_from(tmp_path):
    assert not are_unset(trainer(tmp_path, resume_from_checkpoint="auto"))
    (tmp_path / "checkpoint-1").mkdir()
    assert not are_unset(trainer(tmp_path, resume_from_checkpoint="auto"))


@functools.lru_cache
def bounded():
    return torch.linspace(0.5, 1.5, 32)


@functools.cache
def unbounded():
    return {"rows": (torch.linspace(0.5, 2.5, 32),)}


class Cached(nn.Module):
    """A model whose constructor uses tables that functions keep, and whose forward pass calls these functions."""

    def __init__(self):
        super().__init__()
        self.inner = make()
        self.scale = nn.Parameter(bounded()[:1].clone())
        self.register_buffer("table", 2 * unbounded()["rows"][0], persistent=False)

    def forward(self, input_ids, labels=None, **others):
        found = self.inner(input_ids, labels=labels, **others)
        factor = bounded().mean() * unbounded()["rows"][0].mean() * self.table.mean()
        return type(found)(loss=found.loss * factor * self.scale.sum(), logits=found.logits)


@pytest.mark.parametrize("fills", ["sequential", "counter"])
def test_tables_in_caches_of_functions_have_values(tmp_path, fills):
    def fresh(make_trainer):
        # As in a new process.
        bounded.cache_clear()
        unbounded.cache_clear()
        made = make_trainer(tmp_path, Cached, initial_weights=fills)
        made.train()
        return weights(made)

    assert are_equal(fresh(trainer), fresh(resumed))
    assert torch.equal(bounded(), torch.linspace(0.5, 1.5, 32))
