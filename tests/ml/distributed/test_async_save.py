"""Several processes write a checkpoint beside the run: the same bits, and one decision on its failure."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from forgather.errors import CheckpointError, DistributedError
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.checkpoint import LocalStorage, list_checkpoints, verify
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_several_ranks import make
from tests.ml.fixtures import Noisy

EVERY_TWO = {"save_strategy": "steps", "save_steps": 2, "data": Noisy(14), "batch_size": 2, "ranks": 2}


class Notes(TrainerCallback):
    """Notes steps and checkpoints; the ranks are never at the same place."""

    def __init__(self):
        self.steps, self.saved = [], []

    def on_step_begin(self, args, state, control, **others):
        time.sleep(0.02 * dist.get_rank())

    def on_step_end(self, args, state, control, **others):
        self.steps.append(state.global_step)

    def on_save(self, args, state, control, **others):
        self.saved.append((state.global_step, self.steps[-1]))


class Refuses(LocalStorage):
    """Does not give a step its checkpoint, on one rank."""

    def __init__(self, step):
        self.step = step

    def rename(self, old, new):
        if new.name == f"checkpoint-{self.step}":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().rename(old, new)


def trained(folder, given, refuses=None):
    notes = Notes()
    trainer = make(folder, callbacks=[notes], **{**EVERY_TWO, **given})
    if refuses is not None:
        trainer.storage = Refuses(refuses)
    try:
        trainer.train()
    except CheckpointError as error:
        return error.code, error.message, notes.steps[-1]
    return notes.saved


def test_the_bits_are_those_of_a_run_that_waits(tmp_path):
    run_ranks(2, trained, tmp_path / "waits", {})
    first, second = run_ranks(2, trained, tmp_path / "goes on", {"async_save": True, "save_total_limit": 2})
    assert first == second
    assert [2, 4, 6, 7] == [step for step, _ in first]
    assert [6, 7] == [step for step, _ in list_checkpoints(tmp_path / "goes on")]
    for step, folder in list_checkpoints(tmp_path / "goes on"):
        expected = verify(tmp_path / "waits" / f"checkpoint-{step}").files
        actual = verify(folder).files
        tensors = [name for name in expected if name.endswith(".safetensors")]
        assert {name: expected[name] for name in tensors} == {name: actual[name] for name in tensors}


class Words:
    """A tokenizer of which the process that writes alone is asked for files."""

    def __init__(self, has_room):
        self.has_room, self.times = has_room, 0

    def save_pretrained(self, place):
        self.times += 1
        if not self.has_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        Path(place, "words.json").write_text("{}")


def with_words(folder, has_room):
    words = Words(has_room)
    trainer = make(folder, processing_class=words, **EVERY_TWO, max_steps=4)
    try:
        trainer.train()
    except (DistributedError, OSError) as error:
        return type(error).__name__, words.times
    return words.times


def test_the_tokenizer_is_asked_once_and_its_failure_is_one_of_all(tmp_path):
    assert [2, 0] == run_ranks(2, with_words, tmp_path / "good", True)  # for checkpoints, and for the model
    assert "words.json" in verify(tmp_path / "good" / "checkpoint-4").files
    assert [("OSError", 1), ("DistributedError", 0)] == run_ranks(2, with_words, tmp_path / "bad", False)


@pytest.mark.parametrize("step", [4, 7])
def test_a_failure_is_raised_on_all_after_the_same_step(step, tmp_path):
    first, second = run_ranks(2, trained, tmp_path, {"async_save": True}, step)
    assert first == second
    code, message, ended_at = first
    assert "FG609" == code
    assert f"the checkpoint of step {step} could not be written" in message
    assert step <= ended_at <= step + 3
    assert step not in [step for step, _ in list_checkpoints(tmp_path)]
    verify(tmp_path / "checkpoint-2")
