"""Conversations of different lengths under several strategies: padding, and turns without a loss, change nothing.

The rows have the columns of `tokenize_chats`. The loop below sees each row alone, so it needs no padding.
"""

import pytest
import torch
from torch.nn import functional as F

from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.data import CausalLMCollator
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.state import on_host
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.pipeline_runs import VOCAB, make_llama
from tests.ml.fixtures import Recorder
from tests.patience import patience

LAYOUTS = {
    "one": (1, 4, Trainer, TrainingArguments, {}),
    "accumulated": (1, 1, Trainer, TrainingArguments, {"gradient_accumulation_steps": 4}),
    "DDP": (2, 2, AccelTrainer, AccelTrainingArguments, {}),
    "FSDP2": (2, 2, AccelTrainer, AccelTrainingArguments, {"fsdp": "full_shard"}),
    "1F1B": (2, 4, PipelineTrainer, PipelineTrainingArguments, {"pipeline_chunks": 2}),
}
STEPS = 3


def conversations():
    generator, made = torch.Generator().manual_seed(5), []
    for number in range(8):
        # Two turns: a question without a loss, an answer with one, and the same again.
        parts = [torch.randint(3, VOCAB, (1 + (number * k) % 5,), generator=generator).tolist() for k in (1, 2, 3, 4)]
        ids = [token for part in parts for token in part]
        labels = [token if place % 2 else -100 for place, part in enumerate(parts) for token in part]
        made.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return made


def ours(folder, layout):
    ranks, rows, trainer, arguments, given = LAYOUTS[layout]
    plain = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.5}
    plain |= {"max_steps": STEPS, "train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no"}
    several = {"distributed_env": DistributedEnvironment(timeout_seconds=patience(30))} if ranks > 1 else {}
    recorder = Recorder()
    run = trainer(
        lambda: make_llama(dtype=torch.float64),
        arguments(str(folder), use_cpu=True, per_device_train_batch_size=rows, **{**plain, **given}),
        train_dataset=conversations(),
        data_collator=CausalLMCollator(),
        callbacks=[recorder],
        **several,
    )
    run.train()
    return [line["loss"] for line in recorder.lines if "loss" in line], on_host(run.strategy.export(), keep=True)


def plain_loop(rows_of_step, *, keeps_questions=False):
    model, losses = make_llama(dtype=torch.float64).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        rows = [conversations()[(step * rows_of_step + place) % 8] for place in range(rows_of_step)]
        targets = [torch.tensor(row["input_ids" if keeps_questions else "labels"])[1:] for row in rows]
        count = sum(int((target != -100).sum()) for target in targets)
        total = 0.0
        for row, target in zip(rows, targets, strict=True):
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
            total = total + F.cross_entropy(logits, target, reduction="sum", ignore_index=-100) / count
        total.backward()
        losses.append(total.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("layout", thinned([*LAYOUTS], lambda layout: layout == "1F1B"))
def test_padded_conversations_are_those_of_rows_alone(layout, tmp_path):
    losses, state = plain_loop(4)
    for found, own in run_ranks(LAYOUTS[layout][0], ours, tmp_path, layout):
        assert found == pytest.approx(losses, rel=0, abs=1e-10)
        assert max(float((value - state[name]).abs().max()) for name, value in own.items()) <= 1e-9


def test_a_loss_of_the_questions_too_is_another_one():
    """The negative control."""
    assert plain_loop(4)[0] != pytest.approx(plain_loop(4, keeps_questions=True)[0], abs=1e-3)
