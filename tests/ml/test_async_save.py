"""A checkpoint that is written beside the run is the one of its step, and its failure is the run's."""

import errno
import functools
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.checkpoint import LocalStorage, list_checkpoints, verify
from forgather.ml.checkpoint.manifest import MANIFEST
from forgather.ml.distributed import collectives
from forgather.ml.trainer.snapshot import Snapshot
from forgather.ml.trainer.staging import Staging
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import rows, tiny_llama
from tests.patience import patience

EVERY_TWO = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}


class Slow(LocalStorage):
    """Makes each file late, unless it is let."""

    def __init__(self):
        self.may_go = threading.Event()

    def create(self, file):
        self.may_go.wait(0.05)
        return super().create(file)


class Watch(TrainerCallback):
    """Notes which steps were taken and which checkpoints were there when it was told of them."""

    def __init__(self, storage=None, lets_go_at=None):
        self.steps, self.saved, self.storage, self.lets_go_at = [], [], storage, lets_go_at

    def on_step_end(self, args, state, control, **others):
        self.steps.append(state.global_step)
        if state.global_step == self.lets_go_at:
            self.storage.may_go.set()

    def on_save(self, args, state, control, **others):
        assert (Path(args.output_dir) / f"checkpoint-{state.global_step}" / MANIFEST).is_file()
        self.saved.append((state.global_step, self.steps[-1]))


def trained(settings, folder, storage=None, callback=None, **given):
    args = settings(**{**EVERY_TWO, "output_dir": str(folder), **given})
    watch = callback or Watch()
    trainer = Trainer(tiny_llama(), args, train_dataset=rows(), callbacks=[watch], storage=storage)
    trainer.train()
    return trainer, watch


def digests(folder, step):
    facts = verify(folder / f"checkpoint-{step}").files
    return {name: fact.digest for name, fact in facts.items() if name.endswith((".safetensors", "training_state.json"))}


def test_it_holds_the_bits_of_its_step_whatever_the_run_does_meanwhile(settings, tmp_path):
    trained(settings, tmp_path / "a")
    slow = Slow()
    _, watch = trained(settings, tmp_path / "b", slow, Watch(slow, lets_go_at=4), async_save=True)
    assert [step for step, _ in watch.saved] == [2, 4, 6, 8]
    assert watch.saved[0][1] > 2  # the run went on
    for step, _ in list_checkpoints(tmp_path / "a"):
        assert digests(tmp_path / "a", step) == digests(tmp_path / "b", step)


def test_callbacks_are_told_of_it_with_the_history_of_its_step(settings, tmp_path):
    class Late(Slow):
        def create(self, file):
            if ".saving-checkpoint-2-" in str(file):
                self.may_go.wait(patience(10))
            return super().create(file)

    class History(Watch):
        def on_save(self, args, state, control, **others):
            super().on_save(args, state, control, **others)
            assert state.global_step == state.log_history[-1]["step"]

    late, every_step = Late(), {"logging_strategy": "steps", "logging_steps": 1}
    _, watch = trained(settings, tmp_path, late, History(late, lets_go_at=4), async_save=True, **every_step)
    assert (2, 4) == watch.saved[0]


def test_the_run_waits_where_the_earlier_one_is_still_being_written(settings, tmp_path, caplog):
    trained(settings, tmp_path, Slow(), async_save=True, save_total_limit=1)
    assert [8] == [step for step, _ in list_checkpoints(tmp_path)]
    assert 1 == caplog.text.count("waiting until the checkpoint of step")


class Full(LocalStorage):
    """Has no space left for the checkpoint of a step."""

    def __init__(self, step):
        self.step = step

    def create(self, file):
        if f"checkpoint-{self.step}-" in str(file) and file.name == "model.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(file)


def test_its_failure_ends_the_run_within_a_step_and_leaves_the_earlier_ones(settings, tmp_path):
    watch = Watch()

    class Patient(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            if state.global_step == 4:
                time.sleep(0.5)  # so that the thread fails within step 5

    with pytest.raises(CheckpointError, match="the checkpoint of step 4 could not be written") as failed:
        trainer = Trainer(
            tiny_llama(),
            settings(**EVERY_TWO, async_save=True),
            train_dataset=rows(),
            callbacks=[watch, Patient()],
            storage=Full(4),
        )
        trainer.train()
    assert "FG609" == failed.value.code
    assert 5 == watch.steps[-1]
    assert ["checkpoint-2"] == sorted(entry.name for entry in Path(trainer.args.output_dir).glob("*checkpoint*"))
    verify(Path(trainer.args.output_dir) / "checkpoint-2")


def test_a_failure_of_the_last_one_is_not_lost(settings, tmp_path):
    with pytest.raises(CheckpointError, match="step 8"):
        trained(settings, tmp_path, Full(8), async_save=True)
    assert not (tmp_path / "model.safetensors").exists()


def test_what_is_being_written_is_finished_where_the_run_fails(settings, tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(settings, tmp_path, Slow(), Fails(), async_save=True)
    assert [2] == [step for step, _ in list_checkpoints(tmp_path)]


def test_ctrl_c_is_answered_when_the_state_lies_on_the_disk(settings, tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 3:
                signal_own_process()

    with pytest.raises(KeyboardInterrupt) as stopped:
        trained(settings, tmp_path, Slow(), Stops(), async_save=True)
    assert [2, 3] == [step for step, _ in list_checkpoints(tmp_path)]
    assert "checkpoint-3" in stopped.value.__notes__[0]


def signal_own_process():
    os.kill(os.getpid(), 2)


def test_the_memory_of_copies_is_used_again():
    staging = Staging()
    weight = torch.randn(8, 4).T  # not contiguous
    first = staging.copy(Snapshot(step=1, tensors={"a": {"w": weight}}, texts={}))
    place, held = first.tensors["a"]["w"].data_ptr(), first.tensors["a"]["w"].clone()
    assert torch.equal(weight, held)
    weight.add_(1)
    second = staging.copy(Snapshot(step=2, tensors={"a": {"w": weight}}, texts={"t": b""}))
    assert place == second.tensors["a"]["w"].data_ptr() != weight.data_ptr()
    assert torch.equal(weight, second.tensors["a"]["w"])
    other = staging.copy(Snapshot(step=2, tensors={"b": {"w": weight[:2]}}, texts={}))
    assert torch.equal(weight[:2], other.tensors["b"]["w"])


class Stream:
    """A stream of the CPU, which records what it is asked to do; a copy is done when it is asked for."""

    calls = []

    def __init__(self, device=None, name="side"):
        self.name = name

    def __enter__(self):
        self.calls.append(f"in {self.name}")

    def __exit__(self, *error):
        self.calls.append(f"out of {self.name}")

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.calls.append("event")
        return SimpleNamespace(synchronize=lambda: self.calls.append("the host waits"))

    def wait_event(self, event):
        self.calls.append(f"{self.name} waits for the event")


def test_an_accelerator_copies_into_one_buffer_while_the_host_goes_on(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: stream.calls.append("kept"))
    current = functools.partial(Stream, name="model")
    streams = SimpleNamespace(Stream=Stream, accelerator=SimpleNamespace(current_stream=current))
    staging = Staging(streams=streams, host_types=())
    given = {
        "w": torch.randn(8, 3).T,
        "steps": torch.tensor(7.0),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(5).bfloat16(),
        "number": torch.arange(3),
    }
    copy = staging.copy(Snapshot(step=1, tensors={"a": given, "b": {}}, texts={})).tensors
    assert ["a", "b"] == list(copy)
    order = ["side waits for model", "in side", *["kept"] * 6, "event", "out of side", "model waits for the event"]
    assert order == Stream.calls
    staging.wait()
    staging.wait()
    assert [*order, "the host waits"] == Stream.calls
    assert given.keys() == copy["a"].keys()
    for name, tensor in given.items():
        found = copy["a"][name]
        assert torch.equal(tensor, found)
        assert (tensor.dtype, tensor.shape) == (found.dtype, found.shape)
    places = {one.untyped_storage().data_ptr() for one in copy["a"].values()}
    assert 1 == len(places)
    again = staging.copy(Snapshot(step=2, tensors={"a": {"w": given["w"] + 1}}, texts={})).tensors["a"]["w"]
    assert places == {again.untyped_storage().data_ptr()}
    assert torch.equal(given["w"] + 1, again)


def _talks_on_both_channels():
    channel = collectives.background_groups()
    assert channel is collectives.background_groups()
    heard = []

    def beside():
        with collectives.use_groups(channel):
            heard.extend(collectives.all_gather(("beside", dist.get_rank(), number)) for number in range(50))

    thread = threading.Thread(target=beside)
    thread.start()
    own = [collectives.all_gather(("run", dist.get_rank(), number)) for number in range(50)]
    thread.join()
    return own, heard


def test_a_thread_beside_the_run_speaks_through_a_channel_of_its_own():
    for own, heard in run_ranks(3, _talks_on_both_channels, start_group=True):
        for name, lines in (("run", own), ("beside", heard)):
            assert [[(name, rank, number) for rank in range(3)] for number in range(50)] == lines
