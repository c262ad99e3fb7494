"""Several processes write a checkpoint beside the run: the same bits, and one decision on its failure."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from forgather.errors import CheckpointError, DistributedError
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.checkpoint import LocalStorage, list_checkpoints, verify
from forgather.ml.distributed.host_tree import HostTree
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_several_ranks import make
from tests.ml.fixtures import Noisy
from tests.patience import patience

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


class Held(LocalStorage):
    """Keeps the files of the first checkpoint back on one rank, until it is let."""

    def __init__(self):
        self.may_go, self.is_in_time = threading.Event(), None

    def create(self, file):
        if dist.get_rank() == 1 and "checkpoint-2-" in str(file) and self.is_in_time is None:
            self.is_in_time = self.may_go.wait(patience(20))
        return super().create(file)


def beside_a_late_writer(folder):
    """Returns what was exchanged between hosts by the training thread in each step, and when saves were reported."""
    exchanged, steps, saved, held = [], [], [], Held()
    training = threading.current_thread()

    def counted(name):
        whole = getattr(HostTree, name)

        def count(*args, **given):
            if threading.current_thread() is training:
                exchanged.append(name)
            return whole(*args, **given)

        return count

    class Lets(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            steps.append((state.global_step, [*exchanged]))

        def on_step_end(self, args, state, control, **others):
            if state.global_step == 6:
                held.may_go.set()

        def on_save(self, args, state, control, **others):
            saved.append((state.global_step, steps[-1][0]))

    # As one of Forgather's own callbacks: those of users have an exchange of their flags in each step.
    Lets.__module__ = "forgather.ml.callbacks.lets"
    for name in ("start_all_reduce", "broadcast", "broadcast_objects", "all_gather"):
        setattr(HostTree, name, counted(name))
    settings = {**EVERY_TWO, "save_steps": 100, "async_save": True}
    trainer = make(folder, callbacks=[Lets()], **settings)
    trainer.storage = held
    save_at(trainer, 2)
    trainer.train()
    return held.is_in_time, steps, saved


def save_at(trainer, step):
    class Saves(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_save |= state.global_step == step

    Saves.__module__ = "forgather.ml.callbacks.saves"
    trainer.add_callback(Saves())


def test_no_exchange_between_hosts_stalls_the_steps_beside_a_late_writer(tmp_path):
    first, second = run_ranks(2, beside_a_late_writer, tmp_path)
    assert second[0] is True  # five steps were done while the files were kept back
    for _, steps, saved in (first, second):
        before = dict(steps)
        assert before[2] == before[6]  # of the steps 3 to 6, which begin at step 2 to 5
        assert saved[0][0] == 2 and saved[0][1] >= 6 - 1
    assert first[2] == second[2]
