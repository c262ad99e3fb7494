"""A model and rows of the user's own, which nobody seeded: one config begins with the same ones in every strategy."""

import random

import numpy
import pytest
import torch

from forgather.project.project import Project
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.project.workbench import make_project

OWN = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))

def rows():
    return [{"input_ids": row, "labels": row} for row in torch.randint(32, (16, 8))]
"""
CONFIG = """\
main: !singleton:forgather.ml:{{ trainer }}
  model: !singleton:own.py:model
  args: !singleton:forgather.ml:{{ arguments }}
    output_dir: {{ project_dir }}/out
    use_cpu: true
    save_strategy: "no"
    max_steps: 2
    logging_steps: 1
    seed: 5
    per_device_train_batch_size: {{ rows }}
    {{ more }}
  train_dataset: !singleton:own.py:rows
"""
ACCEL = {"trainer": "AccelTrainer", "arguments": "AccelTrainingArguments", "rows": 2}
STRATEGIES = {
    "ddp": ACCEL,
    "fsdp2": {**ACCEL, "more": "fsdp: true"},
    "zero": {**ACCEL, "more": "deepspeed: {zero_optimization: {stage: 2}}"},
    "pipeline": {
        "trainer": "PipelineTrainer",
        "arguments": "PipelineTrainingArguments",
        "rows": 4,
        "more": "schedule_class: ScheduleGPipe",
    },
}
SINGLE = {"trainer": "Trainer", "arguments": "TrainingArguments", "rows": 4}


def losses(folder, start, variables):
    # What the process drew before is another thing in each.
    random.seed(start), numpy.random.seed(start), torch.manual_seed(start)
    trainer = Project(
        "a", folder, more=variables.get("more", ""), **{k: v for k, v in variables.items() if k != "more"}
    )("main")
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def losses_of_a_rank(folder, variables):
    import os

    return losses(folder, 100 + int(os.environ["RANK"]), variables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("own"), {"templates/configs/a.yaml": CONFIG, "own.py": OWN})


@pytest.fixture(scope="module")
def alone(folder):
    return losses(folder, 7, SINGLE)


def test_two_runs_of_one_config_are_one(folder, alone):
    assert alone == losses(folder, 8, SINGLE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_begins_as_one_process_does(folder, alone, strategy):
    if "zero" in strategy:
        import_engine()
    first, second = run_ranks(2, losses_of_a_rank, folder, STRATEGIES[strategy])
    assert first == second
    assert alone == pytest.approx(first, abs=2e-6)
