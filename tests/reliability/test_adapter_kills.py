"""A LoRA with trained token rows is killed at any moment and resumed: the bits are those of a run that was left alone."""

import random
import time

import pytest
import torch

from forgather.ml import Trainer, TrainingArguments
from forgather.ml.adapters import lora
from forgather.ml.checkpoint.state import read_tensors
from tests.ml.fixtures import rows, tiny_llama
from tests.reliability import job
from tests.reliability.forks import Child, in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
FULL, QUICK = 30, 3
STEPS = 6


def train(folder, steps=STEPS):
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
    )
    adapter = lora(r=2, lora_alpha=8, lora_dropout=0.3, trainable_token_indices=[3, 5])
    Trainer(tiny_llama(), args, train_dataset=rows(13), adapter=adapter).train(resume_from_checkpoint="auto")


def left_by(folder):
    """Digests of the last checkpoint, and the tensors of the adapter that the run left."""
    return job.digest(folder, STEPS), read_tensors(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """What a run leaves that is not disturbed, and how long it takes. The first run imports what the others use."""
    place = tmp_path_factory.mktemp("clean")
    train(place / "imports", steps=1)
    began = time.monotonic()
    assert "" == in_child(train, place / "run").error
    return left_by(place / "run"), time.monotonic() - began


def test_a_killed_adapter_is_resumed_to_the_same_bits(full, clean, tmp_path, record_property):
    expected, seconds = clean
    assert any("trainable_tokens" in name for name in expected[1])
    assert any("lora_B" in name and float(tensor.abs().max()) for name, tensor in expected[1].items())
    dice = random.Random(13)
    kills, resumed, number = 0, 0, 0
    while kills < (FULL if full else QUICK):
        folder = tmp_path / str(number)
        number += 1
        # At most three times in one folder, so that every run ends.
        for _ in range(3):
            child = Child(train, folder)
            time.sleep(dice.uniform(0.1, 0.9) * seconds)
            child.kill()
            ended = child.ended()
            assert "" == ended.error, ended.error
            if ended.signal != 9:
                break
            kills += 1
            resumed += job.newest_step(folder) > 0 if folder.exists() else 0
        assert "" == in_child(train, folder).error
        digests, tensors = left_by(folder)
        assert [] == job.differences(expected[0], digests), f"after {kills} kills"
        assert expected[1].keys() == tensors.keys()
        assert all(torch.equal(expected[1][name], tensor) for name, tensor in tensors.items())
    # Kills before the first checkpoint alone would show nothing about resuming.
    assert resumed > 0
    record_property("difference", 0.0)
    record_property("kills", kills)
