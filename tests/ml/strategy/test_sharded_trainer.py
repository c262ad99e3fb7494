"""AccelTrainer with sharded and sliced weights: trained, saved, resumed by another layout, and equal to one process."""

import functools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from forgather.ml import AccelTrainer, AccelTrainingArguments, Trainer, TrainingArguments
from forgather.ml.strategy.fsdp2 import Sharded
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.strategy.equality import environment
from tests.ml.strategy.models import batches, llama

LAYOUTS = {
    "shards": (2, 2, {"fsdp": "FULL_SHARD", "fsdp_config": {"activation_checkpointing": True}}),
    "slices": (2, 1, {"tensor_parallel_size": 2}),
    "slices of replicas": (4, 2, {"tensor_parallel_size": 2}),
}


def rows():
    batch = batches(1, rows=44)[0]
    return [{name: value[row] for name, value in batch.items()} for row in range(44)]


def settings(folder, replicas, **more):
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4 // replicas,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "report_to": [],
        **more,
    }


def made(trainer, arguments, folder, replicas, more):
    data = rows()
    return trainer(
        model_init=functools.partial(llama, tie_word_embeddings=True),
        args=arguments(**settings(folder, replicas, **more)),
        train_dataset=data,
        eval_dataset=data[:10],
        distributed_env=environment(),
    )


def curve(trainer):
    names = ("loss", "grad_norm", "eval_loss")
    return [line[name] for line in trainer.state.log_history for name in names if name in line]


def trained(folder, replicas, more, resume):
    trainer = made(AccelTrainer, AccelTrainingArguments, folder, replicas, more)
    assert isinstance(trainer.strategy, Sharded)
    trainer.train(resume_from_checkpoint=resume)
    return curve(trainer)


def alone(folder):
    trainer = made(Trainer, TrainingArguments, folder, 1, {})
    trainer.train()
    return curve(trainer)


def saved(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()


@pytest.mark.matrix
@pytest.mark.parametrize("name", thinned(LAYOUTS, lambda name: name == "shards"))
def test_a_run_is_saved_and_resumed_as_one_of_one_process(name, tmp_path):
    ranks, replicas, more = LAYOUTS[name]
    (expected,) = run_ranks(1, alone, tmp_path / "one")
    found = run_ranks(ranks, trained, tmp_path / "several", replicas, more, None)
    assert all(pytest.approx(expected, rel=1e-10) == line for line in found)
    assert json.loads((tmp_path / "several/checkpoint-3/config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    resumed = run_ranks(ranks, trained, tmp_path / "again", replicas, more, str(tmp_path / "one/checkpoint-3"))
    assert all(pytest.approx(expected, rel=1e-10) == line for line in resumed)
    reference = saved(tmp_path / "one")
    for folder in ("several", "again"):
        weights = saved(tmp_path / folder)
        assert list(reference) == list(weights)
        assert all(torch.allclose(weights[key], reference[key], rtol=0, atol=1e-12) for key in reference)
