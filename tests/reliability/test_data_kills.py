"""Runs on packed, mixed or grouped rows are killed at any moment and resumed: the bits are those of a run left alone."""

import functools
import random

import pytest
import torch
from datasets import Dataset

from forgather.ml import Trainer
from forgather.ml.data import CausalLMCollator, mix
from tests.ml.fixtures import tiny_llama
from tests.ml.packed_rows import SYMBOLS, VOCAB, packed
from tests.reliability.killed_runs import assert_kills_change_nothing, left_alone, saving_each_step

FULL, QUICK = 12, 1
STEPS = 9  # of 6 in an epoch
WEIGHTS = "model.safetensors"


def uneven(count, seed):
    dice = random.Random(seed)
    return [{"input_ids": dice.choices(range(1, VOCAB), k=dice.randint(3, 20))} for _ in range(count)]


def packed_rows():
    dice = random.Random(3)
    return packed(["".join(dice.choices(SYMBOLS, k=dice.randint(3, 9))) for _ in range(20)], 12)[:12]


def mixed_rows():
    sets = {name: Dataset.from_list(uneven(count, name)) for name, count in [("a", 9), ("b", 20)]}
    return mix(sets, weights={"a": 0.5, "b": 0.5}).select(range(12))


KINDS = {
    "packed": (packed_rows, {}),
    "mixed": (mixed_rows, {}),
    "grouped": (lambda: uneven(12, 5), {"train_sampling_strategy": "group_by_length"}),
}


def train(kind, folder, steps):
    torch.manual_seed(0)
    make_rows, options = KINDS[kind]
    args = saving_each_step(folder, steps, **options)
    collator = None if kind == "packed" else CausalLMCollator()
    model = tiny_llama(vocab_size=VOCAB, attention_dropout=0.2)
    Trainer(model, args, train_dataset=make_rows(), data_collator=collator).train(resume_from_checkpoint="auto")


@pytest.mark.parametrize("kind", [*KINDS])
def test_a_killed_run_is_resumed_to_the_same_bits(kind, full, tmp_path, record_property):
    own = functools.partial(train, kind)
    clean = left_alone(own, tmp_path / "clean", STEPS, WEIGHTS)

    assert_kills_change_nothing(own, clean, tmp_path, STEPS, WEIGHTS, FULL if full else QUICK)
    record_property("difference", 0.0)
