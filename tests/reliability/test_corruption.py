"""R6: damage to any file of a checkpoint is found and named, and `auto` goes on from the newest intact checkpoint."""

import logging
import random
import shutil

import pytest

from forgather.errors import CheckpointError
from forgather.ml.checkpoint import newest_verified, verify
from forgather.ml.checkpoint.manifest import MANIFEST, extra_files
from tests.project.workbench import fgcli
from tests.reliability import job, two_ranks
from tests.reliability.bitflip import DAMAGES, Damaged, swap

EACH = 500


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The folder of a finished run; a test copies it, or puts back what it changes."""
    folder = tmp_path_factory.mktemp("clean") / "out"
    job.trainer(folder, "synchronous").train()
    return folder


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    """The last checkpoints of two ranks that hold shards, and of two that hold stages."""
    place = tmp_path_factory.mktemp("two_ranks")
    for strategy in ("FSDP2", "pipeline"):
        two_ranks.clean(place / strategy, strategy)
    return [place / strategy / f"checkpoint-{two_ranks.STEPS}" for strategy in ("FSDP2", "pipeline")]


@pytest.fixture
def copied(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "out")


def files_of(checkpoint):
    return [checkpoint / name for name in (*verify(checkpoint).files, MANIFEST)]


def checkpoints_of(folder):
    return [folder / f"checkpoint-{step}" for step in (3, 6, 9)]


def found(checkpoint):
    """Returns what `verify` says of a checkpoint; "" where it finds nothing."""
    try:
        verify(checkpoint)
    except CheckpointError as error:
        return error.message
    return ""


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_named(kind, figure, clean, of_two_ranks):
    dice = random.Random(7)
    files = [file for checkpoint in [*checkpoints_of(clean), *of_two_ranks] for file in files_of(checkpoint)]
    missed = []
    for number in range(EACH):
        file = files[number % len(files)]
        with Damaged(file, DAMAGES[kind], dice):
            said = found(file.parent)
        # A manifest whose format has become another number is told as one of another version.
        if str(file) not in said and not (file.name == MANIFEST and str(file.parent) in said):
            missed.append((file.name, said))
    assert [] == missed
    figure("R6", f"{EACH} of {EACH} {kind}")


def test_the_manifest_lists_every_file_of_every_rank(clean, of_two_ranks):
    for checkpoint in [*checkpoints_of(clean), *of_two_ranks]:
        assert [] == list(extra_files(checkpoint, verify(checkpoint)))
    for checkpoint in of_two_ranks:
        assert any("-00002-of-00002" in name for name in verify(checkpoint).files)


def test_a_missing_file_is_named(figure, clean):
    files = [file for checkpoint in checkpoints_of(clean) for file in files_of(checkpoint)]
    for file in files:
        away = file.rename(clean / "away")
        assert file.name in found(file.parent)
        away.rename(file)
        assert "" == found(file.parent)
    figure("R6", f"{len(files)} of {len(files)} missing")


def test_swapped_files_are_named(figure, clean):
    early, _, late = checkpoints_of(clean)
    names = [file.name for file in files_of(late) if file.read_bytes() != (early / file.name).read_bytes()]
    for name in names:
        swap(early / name, late / name)
        for checkpoint in (early, late):
            assert str(checkpoint / name) in found(checkpoint)
        swap(early / name, late / name)
    swap(late / "optimizer.safetensors", late / "model.safetensors")
    assert "model.safetensors" in found(late)
    swap(late / "optimizer.safetensors", late / "model.safetensors")
    figure("R6", f"{len(names) + 1} of {len(names) + 1} swapped")


def test_a_checkpoint_under_the_name_of_another_step_is_named(copied):
    early, _, late = checkpoints_of(copied)
    swap(early, late)
    for checkpoint in (early, late):
        assert "step" in found(checkpoint)


def test_extra_files_are_listed_and_never_read(figure, clean, copied):
    """The run goes on from the checkpoint that they lie in."""
    _, last, later = checkpoints_of(copied)
    shutil.rmtree(later)
    manifest = verify(last)
    assert 0 == fgcli("ckpt", "verify", str(last), cwd=copied).returncode
    names = ["model-00001-of-00001.safetensors", "optimizer.pt", "notes.txt", "inner/rng_state.pth"]
    for name in names:
        (last / name).parent.mkdir(exist_ok=True)
        (last / name).write_bytes(b"\x80\x04not a checkpoint")
    assert sorted(names) == sorted(extra_files(last, manifest))
    done = fgcli("ckpt", "verify", str(last), cwd=copied)
    assert done.returncode and all(name in done.stdout + done.stderr for name in names), done
    assert [] == job.differences(job.digest(clean), job.finish(copied, "synchronous"))
    figure("R6", f"{len(names)} of {len(names)} extra files listed")


@pytest.mark.parametrize("kind", [*DAMAGES, "missing"])
def test_auto_falls_back_and_says_so(kind, clean, copied, caplog):
    """The two newest are damaged, each in another file; the run goes on from the third, to the same end."""
    dice = random.Random(kind)
    damaged = []
    for checkpoint in checkpoints_of(copied)[1:]:
        file = dice.choice(files_of(checkpoint))
        damaged.append(file)
        content = file.read_bytes()
        if kind == "missing":
            file.unlink()
        else:
            file.write_bytes(DAMAGES[kind](content, dice))
    newest, skipped = newest_verified(copied)
    assert (3, 2) == (verify(newest).step, len(skipped))
    with caplog.at_level(logging.WARNING):
        assert [] == job.differences(job.digest(clean), job.finish(copied, "synchronous"))
    for file in damaged:
        assert any("skipped" in line and str(file.parent) in line for line in caplog.messages), caplog.messages


def test_nothing_intact_is_an_error_and_changes_nothing(copied):
    for checkpoint in checkpoints_of(copied):
        (checkpoint / MANIFEST).unlink()
    before = sorted(file for file in copied.rglob("*"))
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints") as caught:
        job.trainer(copied, "synchronous").train("auto")
    assert "FG607" == caught.value.code
    assert before == sorted(file for file in copied.rglob("*"))
