"""R2: whatever a loss of power leaves on the disk, the run goes on from the last save that it was told of, or the next."""

import itertools
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from forgather.errors import ForgatherError
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.checkpoint import verify
from forgather.ml.checkpoint.checkpoint_dir import (
    discard_folder,
    interrupted_replacements,
    list_checkpoints,
    restore_replaced,
    write_checkpoint,
)
from forgather.ml.checkpoint.hf_layout import weight_files
from forgather.ml.checkpoint.model_folder import write_model
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.trainer.rewind import RowRange, SkipList, read_skipped, write_skipped
from tests.matrix import thinned
from tests.ml.fixtures import tiny_llama, weights
from tests.reliability import job
from tests.reliability.forks import in_child, spread
from tests.reliability.powerloss import FilesNotSynced, FoldersNotSynced, Logged, build, losses, read_tree

QUICK = 50
TRAINED = 5
"""Of so many states, one is trained to the end; every one is verified and its step looked at."""


class Saved(TrainerCallback):
    def __init__(self, storage):
        self.storage = storage

    def on_save(self, args, state, control, **kwargs):
        self.storage.saved(state.global_step)


def logged(folder, kind, make_storage):
    """Runs the job, and returns its operations. In a process of its own: a loss of power leaves none that lives."""
    storage = make_storage(folder)
    job.trainer(folder, kind, storage, [Saved(storage)]).train()
    return storage.log


def losses_of(kind, place, make_storage=Logged):
    """Returns the states that a loss of power during a job may leave, its digest and the step it began with."""
    folder = place / kind
    step_before = job.prepare(folder, kind)
    before = read_tree(folder)
    ended = in_child(logged, folder, kind, make_storage)
    assert "" == ended.error, ended.error
    digest = job.digest(folder)
    shutil.rmtree(folder)
    return losses(before, ended.value), digest, step_before


def trial(case, digests, place):
    """Rebuilds a state and goes on from it; returns the step where it went on."""
    number, kind, loss, step_before = case
    folder = place / f"{kind}-{number}" / "out"
    build(folder, loss.files)
    for _, checkpoint in list_checkpoints(folder):
        verify(checkpoint)  # what can be seen is whole
    step = job.resumes_at(folder)
    last = step_before if loss.saved is None else loss.saved
    following = 3 if loss.saved is None else min(loss.saved + 3, job.STEPS)
    assert step in (last, following), f"after operation {loss.operation}: step {last} was saved, and {step} is found"
    assert job.may_be_exported(folder, digests[kind], step_before)
    if number % TRAINED == 0:
        assert [] == job.differences(digests[kind], job.finish(folder, kind))
    shutil.rmtree(folder.parent)
    return step


def test_every_state_that_a_loss_of_power_leaves_goes_on(full, figure, tmp_path):
    began = time.monotonic()
    cases, digests = [], {}
    for kind in job.KINDS:
        found, digests[kind], step_before = losses_of(kind, tmp_path)
        cases += [(kind, loss, step_before) for loss in found]
    assert len(cases) >= 1000
    if not full:
        cases = [cases[number * len(cases) // QUICK] for number in range(QUICK)]
    told = spread(trial, [(number, *case) for number, case in enumerate(cases)], digests, tmp_path)
    trained = -(-len(told) // TRAINED)
    seconds = time.monotonic() - began
    figure(
        "R2",
        f"{len(told)} of {len(told)} states resume from the last save or the next; {trained} trained to the end: the same bits ({seconds:.0f} s)",
    )


def test_a_checkpoint_is_safe_with_the_folders_that_were_made_for_it(tmp_path):
    """Those above it, and those within it."""
    storage = Logged(tmp_path)
    out, content = Path("new/out"), bytes(range(256)) * 40
    write_checkpoint(tmp_path / out, 3, lambda draft: draft.write("inner/deep/a.bin", [content]), storage=storage)
    storage.saved(3)
    found = losses({}, storage.log)
    for number, loss in enumerate(found):
        build(tmp_path / str(number), loss.files)
        step = job.resumes_at(tmp_path / str(number) / out)
        assert step in ((0, 3) if loss.saved is None else (3,)), f"after operation {loss.operation}"
    assert {None, 3} == {loss.saved for loss in found}


def content(draft):
    draft.write("a.bin", [bytes(range(256)) * 40])


def after(folder, act):
    """Returns the states that a loss of power may leave of what lies in a folder while `act(storage)` changes it."""
    before, storage = read_tree(folder), Logged(folder)
    act(storage)
    storage.saved(1)
    return losses(before, storage.log)


def whole_checkpoints(place, loss):
    build(place, loss.files)
    return {verify(checkpoint).step for _, checkpoint in list_checkpoints(place)}


def test_a_folder_that_is_in_the_way_of_a_checkpoint_is_never_lost(tmp_path):
    out = tmp_path / "out"
    (out / "checkpoint-3").mkdir(parents=True)
    (out / "checkpoint-3/own.txt").write_text("somebody's own")
    for number, loss in enumerate(after(out, lambda storage: write_checkpoint(out, 3, content, storage=storage))):
        build(tmp_path / str(number), loss.files)
        assert [b"somebody's own"] == [file.read_bytes() for file in (tmp_path / str(number)).rglob("own.txt")]
        assert loss.saved is None or 3 == verify(tmp_path / str(number) / "checkpoint-3").step


@pytest.mark.parametrize("act", ["removed", "replaced", "brought back"])
def test_a_checkpoint_that_goes_or_comes_is_whole_or_out_of_sight(act, tmp_path):
    out = tmp_path / "out"
    for step in (3, 6):
        write_checkpoint(out, step, content)
    if act == "brought back":
        (out / "checkpoint-3").rename(out / ".replaced-checkpoint-3-999999999")
    acts = {
        "removed": lambda storage: discard_folder(storage, out / "checkpoint-3"),
        "replaced": lambda storage: write_checkpoint(out, 3, content, storage=storage),
        "brought back": lambda storage: restore_replaced(storage, out),
    }
    expected = {"removed": {6}, "replaced": {3, 6}, "brought back": {3, 6}}[act]
    for number, loss in enumerate(after(out, acts[act])):
        found = whole_checkpoints(tmp_path / str(number), loss)
        assert 6 in found and (loss.saved is None or expected == found), f"after operation {loss.operation}"
        if act == "replaced":
            assert 3 in found or interrupted_replacements(tmp_path / str(number))


def test_steps_that_were_left_out_are_known_once_the_run_goes_back(tmp_path):
    out, skips = tmp_path / "out", SkipList(most=5, among=10)
    write_skipped(LocalStorage(), out, "a", skips)
    skips.add(7, RowRange(0, 0, 4), "the loss is nan")
    for number, loss in enumerate(after(out, lambda storage: write_skipped(storage, out, "a", skips))):
        build(tmp_path / str(number), loss.files)
        found = len(read_skipped([tmp_path / str(number)], "a"))
        assert found == 1 if loss.saved else found in (0, 1)


@pytest.mark.parametrize("careless", [FilesNotSynced, FoldersNotSynced])
def test_control_a_writer_that_does_not_sync_is_caught(careless, tmp_path):
    """The replayer finds states from which such a writer cannot go on, or goes on too early."""
    found, digest, step_before = losses_of("synchronous", tmp_path, careless)
    lost = 0
    for number, loss in enumerate(found[:: len(found) // 100]):
        try:
            trial((number * TRAINED + 1, "synchronous", loss, step_before), {"synchronous": digest}, tmp_path)
        except (AssertionError, ForgatherError):
            lost += 1
    assert lost > 20


def test_what_said_how_older_weights_are_read_is_gone_before_newer_ones_have_their_name(tmp_path):
    """A model that cannot be loaded takes the place of one that can: nobody reads its weights as those of the other."""
    out = tmp_path / "out"
    write_model_of(0, out, "50GB", LocalStorage())
    older = (out / "model.safetensors").read_bytes()
    found = after(
        out, lambda storage: write_model(storage, out, lambda draft: draft.write("model.safetensors", [b"x"]))
    )
    for loss in found:
        assert loss.files["model.safetensors"] == older or "config.json" not in loss.files


SIZES = {"one file": "50GB", "shards": "60KB", "other shards": "40KB"}


def write_model_of(seed, folder, shard_size, storage):
    model = tiny_llama(seed)

    def fill(draft):
        weight_files(model, model.state_dict(), shard_size=shard_size).write(draft)
        config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        draft.write("config.json", [json.dumps(config, default=str).encode()])

    write_model(storage, folder, fill)


def which(folder, models):
    """Returns which of the models is loaded from a folder; -1 where none can be. A mixture is none of them."""
    try:
        with without_progress_bars():
            found = weights(AutoModelForCausalLM.from_pretrained(folder))
    except (OSError, ValueError, KeyError, SafetensorError):
        return -1
    equal = [all(torch.equal(one[name], found[name]) for name in one) for one in models]
    assert any(equal), "a mixture of two models was loaded"
    return equal.index(True)


def loaded_after(case, place, models):
    number, files = case
    folder = place / f"model-{number}"
    build(folder, files)
    found = which(folder, models)
    shutil.rmtree(folder)
    return found


NEXT = dict(zip(SIZES, [*list(SIZES)[1:], *SIZES], strict=False))


@pytest.mark.parametrize(
    ("older", "newer"), thinned(itertools.product(SIZES, repeat=2), lambda older, newer: NEXT[older] == newer)
)
def test_a_model_that_replaces_an_older_one_is_loaded_whole_or_not_at_all(older, newer, full, figure, tmp_path):
    folder = tmp_path / "out"
    write_model_of(0, folder, SIZES[older], LocalStorage())
    before, storage = read_tree(folder), Logged(folder)
    write_model_of(1, folder, SIZES[newer], storage)
    storage.saved(1)
    found = losses(before, storage.log)
    if not full:
        found = [found[number * len(found) // 16] for number in range(16)] + [loss for loss in found if loss.saved]
    models = [weights(tiny_llama(seed)) for seed in range(2)]
    told = spread(loaded_after, [(number, loss.files) for number, loss in enumerate(found)], tmp_path, models)
    assert {1} == {which for which, loss in zip(told, found, strict=True) if loss.saved}
    # Shards that take the names of older ones: nothing can be loaded between the first and the last of them.
    if not (older == newer != "one file"):
        assert -1 not in told
    none = f" or, in {told.count(-1)} of them, are refused" if -1 in told else ""
    figure("R2", f"a model, {older} by {newer}: {len(told)} of {len(told)} states load one whole model{none}")
