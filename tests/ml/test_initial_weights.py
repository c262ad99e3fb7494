"""`initial_weights` of a trainer: what it takes, what a checkpoint records of it, and that a resumed run keeps that."""

import functools

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.models import from_pretrained
from forgather.ml.strategy.counter_weights import CounterWeights
from forgather.ml.strategy.state import whole_box
from forgather.ml.trainer.argument_checks import SettingError
from tests.ml.fixtures import rows, tiny_llama

CONFIG = tiny_llama(num_hidden_layers=1).config


def make():
    return LlamaForCausalLM(CONFIG)


def trainer(folder, model=make, **settings):
    fixed = {"use_cpu": True, "per_device_train_batch_size": 4, "save_steps": 1, "save_strategy": "steps"}
    args = TrainingArguments(str(folder), **{"max_steps": 1, "initial_weights": "counter", **fixed, **settings})
    return Trainer(model, args, train_dataset=rows(12))


def test_the_seed_of_the_run_determines_the_weights(tmp_path):
    made = trainer(tmp_path)
    seed_everything(42)
    expected = CounterWeights(make)
    for name, parameter in made.model.named_parameters():
        assert torch.equal(expected.part(name, whole_box(parameter.shape)), parameter), name
    other = trainer(tmp_path, seed=43)
    assert not torch.equal(other.model.lm_head.weight, made.model.lm_head.weight)
    # The definition stays that of torch.
    seed_everything(42)
    one = make()
    two = trainer(tmp_path, initial_weights="sequential").model
    assert all(torch.equal(left, right) for left, right in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(two.lm_head.weight, made.model.lm_head.weight)


def test_a_model_that_exists_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="the model was made before the trainer") as caught:
        trainer(tmp_path, make())
    assert caught.value.code == "FG620"


def test_another_word_is_refused(tmp_path):
    with pytest.raises(SettingError, match="counter"):
        trainer(tmp_path, initial_weights="countr")


def test_a_model_that_cannot_be_computed_by_position_is_refused(tmp_path):
    def orthogonal():
        model = make()
        nn.init.orthogonal_(model.lm_head.weight)
        return model

    with pytest.raises(TrainingError, match="'lm_head.weight' is filled by way of") as caught:
        trainer(tmp_path, orthogonal)
    assert caught.value.code == "FG619"


def test_a_loaded_model_keeps_its_weights(tmp_path):
    stored = make()
    stored.save_pretrained(tmp_path / "model")
    load = functools.partial(from_pretrained, tmp_path / "model")
    with pytest.raises(TrainingError, match="the model is loaded with the weights of its files") as caught:
        trainer(tmp_path / "run", load)
    assert caught.value.code == "FG620"
    made = trainer(tmp_path / "run", load, initial_weights="sequential")
    for left, right in zip(stored.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_checkpoint_records_how_the_weights_were_made(tmp_path):
    trainer(tmp_path).train()
    assert read_manifest(tmp_path / "checkpoint-1").facts["initial_weights"] == "counter-1"
    # What a resumed run would make is not what its weights come from.
    trainer(tmp_path, initial_weights="sequential", max_steps=2, resume_from_checkpoint=True).train()
    assert read_manifest(tmp_path / "checkpoint-2").facts["initial_weights"] == "counter-1"
    trainer(tmp_path / "other", initial_weights="sequential").train()
    assert "initial_weights" not in read_manifest(tmp_path / "other" / "checkpoint-1").facts
    trainer(tmp_path / "other", max_steps=2, resume_from_checkpoint=True).train()
    assert "initial_weights" not in read_manifest(tmp_path / "other" / "checkpoint-2").facts
