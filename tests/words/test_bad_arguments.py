"""A wrong argument of what a script calls is one error with a code and one short line, and nothing is lost by it."""

import inspect
import os

import pytest
import torch

from forgather.distributed import (
    CheckpointManager,
    DistributedDataLoader,
    DistributedTrainer,
    MemoryProfiler,
    ModelParallel,
    PipelineParallel,
    TensorParallel,
    TrainingMonitor,
    launch_in_notebook,
    register_custom_kernel,
    setup_distributed_training,
)
from forgather.distributed.words import _known_settings, _own_words, read_words
from forgather.errors import ForgatherError
from tests.bad_values import BAD_VALUES
from tests.each import each

PARTS = 8
WORDS = sorted(_own_words() | _known_settings())


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def outcome(call):
    """Returns the error of a call, or None; any other error than one of ours fails the test."""
    try:
        call()
    except ForgatherError as error:
        assert len(str(error)) < 1500
        assert str(error).isprintable()
        return error
    return None


def model():
    return torch.nn.Linear(2, 2)


def trainer():
    words = {"fp16": False, "use_cpu": True, "output_dir": "out", "loss_fn": torch.nn.MSELoss()}
    return DistributedTrainer(model(), config=words)


def wrong_values(word):
    for value in BAD_VALUES.values():
        outcome(lambda value=value: read_words({word: value}))
        outcome(lambda value=value: setup_distributed_training(model(), {"fp16": False, word: value}).to_config())


@pytest.mark.parametrize("number", range(PARTS))
def test_a_wrong_value_of_a_word_is_one_error(number):
    each(WORDS[number::PARTS], wrong_values)


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_wrong_argument_of_a_call_is_one_error(value):
    manager = CheckpointManager("saved", save_interval=7)
    script = trainer()
    for name in inspect.signature(CheckpointManager).parameters:
        outcome(lambda name=name: CheckpointManager(**{name: value}).to_config())
    for call in (
        lambda: manager.save(value, 7),
        lambda: manager.save(model(), value),
        lambda: manager.save(model(), 7, value),
        lambda: manager.save(model(), 7, None, value),
        lambda: manager.save(model(), 7, force=value),
        lambda: manager.load(value, model()),
        lambda: manager.load("saved", model(), value),
        lambda: script.restore_from_checkpoint(value),
        lambda: script.reset(discard_checkpoints=value),
        lambda: script.enable_fault_tolerance(value),
        lambda: script.enable_fault_tolerance(max_retry_attempts=value),
        lambda: script.enable_fault_tolerance(checkpoint_interval=value),
        lambda: setup_distributed_training(model(), value),
        lambda: DistributedTrainer(model(), value),
        lambda: ModelParallel(value, ["cpu"]),
        lambda: ModelParallel(model(), value),
        lambda: ModelParallel(model(), [value]),
        lambda: ModelParallel(model(), ["cpu"], value),
        lambda: register_custom_kernel(value),
        lambda: launch_in_notebook(None if callable(value) else value, num_processes=10**6),
        lambda: launch_in_notebook(print, value, num_processes=2**70),
        lambda: launch_in_notebook(print, num_processes=value),
    ):
        error = outcome(call)
        assert error is not None or not os.listdir("saved" if os.path.exists("saved") else ".")
    for kind in (TensorParallel, PipelineParallel):
        for name in inspect.signature(kind).parameters:
            outcome(lambda kind=kind, name=name: kind(**{"model": model(), "devices": [0, 1], name: value}))
    for kind in (TrainingMonitor, MemoryProfiler):
        for name in inspect.signature(kind).parameters:
            outcome(lambda kind=kind, name=name: kind(**{name: value}))
    for name in ("batch_size", "num_workers", "pin_memory", "drop_last", "shuffle", "seed"):
        made = outcome(lambda name=name: DistributedDataLoader([1, 2], **{name: value}))
        assert "FG813" == made.code


def test_only_true_discards_checkpoints():
    for value in ("no", "false", 1, [1]):
        assert "FG813" == outcome(lambda value=value: trainer().reset(discard_checkpoints=value)).code


def test_a_step_that_is_no_number_of_steps_is_not_passed_over():
    manager = CheckpointManager("saved", save_interval=7)
    for step in (0.5, float("nan"), -7, True, "7"):
        error = outcome(lambda step=step: manager.save(model(), step))
        assert "FG813" == error.code
