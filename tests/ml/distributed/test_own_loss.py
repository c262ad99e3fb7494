"""A `compute_loss` of a subclass on several processes: what one process computes with the same micro-batches."""

import pytest
import transformers

from forgather.ml import AccelTrainer, AccelTrainingArguments, Trainer, TrainingArguments
from tests.matrix import thinned
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.fixtures import Recorder, rows, tiny_llama
from tests.ml.test_trainer_hooks import derived, dividing, mean

STRATEGIES = {
    "ddp": {},
    "fsdp2": {"fsdp": True},
    "zero 1": {"deepspeed": {"zero_optimization": {"stage": 1}}},
    "zero 2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "zero 3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
    "tensor parallel": {"tensor_parallel_size": 2, "gradient_accumulation_steps": 2},
}
COMMON = {"use_cpu": True, "max_steps": 2, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "steps"}
COMMON |= {"eval_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-2}
COMMON |= {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}


def losses(kind, args, method):
    recorder = Recorder()
    trainer = derived(kind, compute_loss=method)(
        tiny_llama(),
        args,
        train_dataset=rows(16),
        eval_dataset=rows(8),
        callbacks=[recorder],
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    return [line[name] for line in recorder.lines for name in ("loss", "eval_loss") if name in line]


def of_a_rank(folder, settings):
    args = AccelTrainingArguments(output_dir=str(folder), **COMMON, **settings)
    return [losses(AccelTrainer, args, method) for method in (dividing, mean)]


# test_deepspeed.py compares stages 1 and 2 with one process in every run of the suite.
@pytest.mark.parametrize("strategy", thinned(STRATEGIES, lambda strategy: strategy in ("fsdp2", "tensor parallel")))
def test_two_processes_come_to_the_losses_of_one(tmp_path, strategy):
    alone = TrainingArguments(output_dir=str(tmp_path), **COMMON, gradient_accumulation_steps=2)
    expected = [losses(Trainer, alone, method) for method in (dividing, mean)]
    if "zero" in strategy:
        import_engine()
    first, second = run_ranks(2, of_a_rank, tmp_path, STRATEGIES[strategy])
    assert first == second
    for ours, theirs in zip(expected, first, strict=True):
        assert 3 == len(ours)
        assert ours == pytest.approx(theirs, abs=5e-6)


def test_the_two_ways_of_a_mean_differ_so_that_the_test_above_can_fail(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), **COMMON, gradient_accumulation_steps=2)
    assert abs(losses(Trainer, args, dividing)[0] - losses(Trainer, args, mean)[0]) > 1e-3
