"""What a run leaves behind does not depend on how its processes are arranged: metrics, checkpoints, models."""

import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.checkpoint.reader import whole_weights
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.fsdp2 import fsdp2_strategy
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_several_ranks import COMMON, Signals, StopAt
from tests.ml.distributed.test_shares import collate
from tests.ml.fixtures import largest_difference, rows, tiny_llama, weights
from tests.patience import patience


class ShardTrainer(AccelTrainer):
    """A trainer is a choice of strategy."""

    def choose_strategy(self, environment):
        return fsdp2_strategy(environment, self.args)


# Processes, rows of a replica, trainer, arguments, settings.
LAYOUTS = {
    "one": (1, 4, Trainer, TrainingArguments, {}),
    "copies": (2, 2, AccelTrainer, AccelTrainingArguments, {}),
    "shards": (2, 2, ShardTrainer, AccelTrainingArguments, {"fsdp": "full_shard"}),
    "stages": (2, 4, PipelineTrainer, PipelineTrainingArguments, {"pipeline_chunks": 2}),
    "copies of stages": (
        4, 2, PipelineTrainer, PipelineTrainingArguments, {"pipeline_parallel_size": 2, "pipeline_chunks": 2},
    ),
}  # fmt: skip


def model():
    return tiny_llama(tie_word_embeddings=True, num_key_value_heads=4).double()


def part(folder, layout, callbacks=(), given=None, resume=True):
    """Trains as one of the processes; returns what the run left behind."""
    ranks, batch_size, trainer_class, arguments, settings = LAYOUTS[layout]
    several = {} if ranks == 1 else {"distributed_env": DistributedEnvironment(timeout_seconds=patience(20))}
    settings = {
        **COMMON, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True, "per_device_eval_batch_size": batch_size, **settings, **(given or {}),
        "resume_from_checkpoint": resume,
    }  # fmt: skip
    trainer = trainer_class(
        model,
        arguments(str(folder), per_device_train_batch_size=batch_size, **settings),
        train_dataset=rows(13),
        eval_dataset=rows(11, seed=5),
        data_collator=collate,
        callbacks=list(callbacks),
        **several,
    )
    stopped = None
    try:
        trainer.train()
    except KeyboardInterrupt as error:
        stopped = type(error).__name__
    names = ("step", "loss", "grad_norm", "eval_loss", "epoch")
    lines = [{name: line[name] for name in names if name in line} for line in trainer.state.log_history]
    return {
        "lines": lines,
        "best": trainer.state.best_global_step,
        "stopped": stopped,
        "step": trainer.state.global_step,
    }


def run(folder, layout, *args):
    ranks = LAYOUTS[layout][0]
    return run_ranks(ranks, part, folder, layout, *args)


def saved(folder):
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert "LlamaForCausalLM" == type(loaded).__name__ == loaded.config.architectures[0]
    return weights(loaded)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return run(folder, "one")[0], saved(folder), folder / "checkpoint-7"


def assert_as(alone, results, folder):
    expected, model_of_one, checkpoint_of_one = alone
    for found in results:
        assert expected["best"] == found["best"]
        assert [sorted(line) for line in expected["lines"]] == [sorted(line) for line in found["lines"]]
        for one, other in zip(expected["lines"], found["lines"], strict=True):
            assert one == pytest.approx(other, rel=1e-9)
    assert largest_difference(model_of_one, saved(folder)) < 1e-10
    whole_of_one = dict(whole_weights(checkpoint_of_one))
    assert largest_difference(whole_of_one, dict(whole_weights(folder / "checkpoint-7"))) < 1e-10
    if not list(folder.glob("checkpoint-7/weights-*")):  # no weight is sliced
        assert largest_difference(saved(checkpoint_of_one), saved(folder / "checkpoint-7")) < 1e-10


@pytest.mark.parametrize(
    "layout", thinned([name for name in LAYOUTS if name != "one"], lambda name: name in ("copies", "stages"))
)
def test_a_run_leaves_behind_what_one_process_leaves(layout, alone, tmp_path):
    assert_as(alone, run(tmp_path, layout), tmp_path)


@pytest.mark.parametrize(
    ("first", "then"),
    thinned(
        [
            ("one", "shards"), ("one", "stages"), ("copies", "copies of stages"), ("shards", "one"),
            ("shards", "stages"), ("stages", "one"), ("stages", "shards"), ("copies of stages", "copies"),
            ("copies of stages", "stages"),
        ],
        lambda first, then: (first, then) in (("one", "shards"), ("stages", "one")),
    ),
)  # fmt: skip
def test_a_run_resumes_in_another_layout(first, then, alone, tmp_path):
    run(tmp_path, first, [StopAt(0, 4)], {"load_best_model_at_end": False, "metric_for_best_model": "loss"})
    assert_as(alone, run(tmp_path, then), tmp_path)


@pytest.mark.parametrize("layout", thinned(["shards", "copies of stages"], lambda layout: layout == "shards"))
def test_every_process_is_heard_when_it_is_asked_to_stop(layout, tmp_path):
    ranks = LAYOUTS[layout][0]
    for rank in {1, ranks - 1}:
        results = run(tmp_path / str(rank), layout, [Signals(rank, signal.SIGTERM)])
        assert {("Terminated", 3)} == {(found["stopped"], found["step"]) for found in results}
        assert (tmp_path / str(rank) / "checkpoint-3" / "manifest.json").is_file()


def frozen():
    """A model of which some weights of each block are trained, as with adapters."""
    found = tiny_llama(num_key_value_heads=4)
    for name, parameter in found.named_parameters():
        parameter.requires_grad_("q_proj" in name or "norm" in name)
    return found


def half_part(folder, stop):
    """Trains as one of the processes, in bfloat16, with what is recomputed and frozen."""
    settings = {**COMMON, "fsdp": "full_shard", "bf16": True, "gradient_checkpointing": True}
    args = AccelTrainingArguments(
        str(folder), per_device_train_batch_size=2, **settings | {"save_strategy": "steps", "save_steps": 4}
    )
    environment = DistributedEnvironment(timeout_seconds=patience(20))
    parts = {"train_dataset": rows(13), "data_collator": collate, "distributed_env": environment}
    trainer = AccelTrainer(frozen, args, callbacks=[StopAt(0, 4)] if stop else [], **parts)
    trainer.train(resume_from_checkpoint=True)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_shards_in_bfloat16_with_frozen_weights_go_on_as_if_never_stopped(tmp_path):
    whole = run_ranks(2, half_part, tmp_path / "whole", False)[0]
    run_ranks(2, half_part, tmp_path / "stopped", True)
    assert (7, whole) == (len(whole), run_ranks(2, half_part, tmp_path / "stopped", False)[0])
    name = "checkpoint-7"
    kept, found = (dict(whole_weights(tmp_path / folder / name)) for folder in ("whole", "stopped"))
    assert 0 == largest_difference(kept, found)
    begun = weights(frozen())
    moved = {key for key in begun if not torch.equal(begun[key], found[key].to(begun[key].dtype))}
    assert moved == {key for key in begun if "q_proj" in key or "norm" in key}
