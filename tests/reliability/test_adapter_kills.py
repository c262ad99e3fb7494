"""A LoRA with trained token rows is killed at any moment and resumed: the bits are those of a run that was left alone."""

import pytest
import torch

from forgather.ml import Trainer
from forgather.ml.adapters import lora
from tests.ml.fixtures import rows, tiny_llama
from tests.reliability.killed_runs import assert_kills_change_nothing, left_alone, saving_each_step

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
FULL, QUICK = 30, 3
STEPS = 6
WEIGHTS = "adapter_model.safetensors"


def train(folder, steps):
    torch.manual_seed(0)
    args = saving_each_step(folder, steps)
    adapter = lora(r=2, lora_alpha=8, lora_dropout=0.3, trainable_token_indices=[3, 5])
    Trainer(tiny_llama(), args, train_dataset=rows(13), adapter=adapter).train(resume_from_checkpoint="auto")


def test_a_killed_adapter_is_resumed_to_the_same_bits(full, tmp_path, record_property):
    clean = left_alone(train, tmp_path / "clean", STEPS, WEIGHTS)
    assert any("trainable_tokens" in name for name in clean.tensors)
    assert any("lora_B" in name and float(tensor.abs().max()) for name, tensor in clean.tensors.items())

    assert_kills_change_nothing(train, clean, tmp_path, STEPS, WEIGHTS, FULL if full else QUICK)
    record_property("difference", 0.0)
