"""`AccelTrainer` end to end on gloo ranks."""

import torch

from forgather.ml import AccelTrainer, AccelTrainingArguments
from forgather.ml.distributed.env import DistributedEnvironment
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import Recorder, rows, tiny_llama, weights
from tests.patience import patience


def arguments(folder, **settings):
    common = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "learning_rate": 1e-3}
    return AccelTrainingArguments(output_dir=str(folder), **{**common, **settings})


def trained(folder, settings):
    recorder = Recorder()
    trainer = AccelTrainer(
        tiny_llama,
        arguments(folder, **settings),
        train_dataset=rows(count=32),
        callbacks=[recorder],
        distributed_env=DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20)),
    )
    trainer.train()
    return [line["loss"] for line in recorder.lines if "loss" in line], weights(trainer.model)


def test_all_ranks_train_one_model(tmp_path):
    first, second = run_ranks(2, trained, tmp_path, {"per_device_train_batch_size": 2})
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_one_process_trains_too(tmp_path):
    losses, _ = run_ranks(1, trained, tmp_path, {"per_device_train_batch_size": 4})[0]
    assert 4 == len(losses)


def test_float16_trains(tmp_path):
    losses, _ = run_ranks(2, trained, tmp_path, {"per_device_train_batch_size": 2, "fp16": True})[0]
    assert 4 == len(losses)
