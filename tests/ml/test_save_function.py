"""A user's own files become part of a checkpoint; a user's own storage writes all of it."""

import tempfile
from pathlib import Path

import pytest
import torch

from forgather.errors import CheckpointError, TrainingError
from forgather.ml import Trainer
from forgather.ml.checkpoint import LocalStorage, list_checkpoints, verify
from forgather.project import Project
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_several_ranks import make
from tests.ml.fixtures import rows, tiny_llama
from tests.project.workbench import make_project

EVERY_TWO = {"save_strategy": "steps", "save_steps": 2}


def a_file(model, step, path):
    torch.save({"weights": model.state_dict(), "step": step}, path)


def a_folder(model, step, path):
    (path / "deep").mkdir(parents=True)
    (path / "step.txt").write_text(str(step))
    (path / "deep" / "big.bin").write_bytes(bytes(20 << 20))


def nothing(model, step, path):
    assert not path.exists()


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where functions write; it must be empty in the end."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    yield tmp_path / "scratch"
    assert [] == list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("function", "names"),
    [(a_file, ["custom"]), (a_folder, ["custom/deep/big.bin", "custom/step.txt"]), (nothing, [])],
)
def test_what_it_makes_is_part_of_the_checkpoint(function, names, beside, settings, tmp_path, scratch):
    args = settings(**EVERY_TWO, async_save=beside)
    Trainer(tiny_llama(), args, train_dataset=rows(), save_function=function).train()
    for step, folder in list_checkpoints(Path(args.output_dir)):
        manifest = verify(folder)
        assert names == sorted(name for name in manifest.files if name.startswith("custom"))
        if function is a_file:
            assert step == torch.load(folder / "custom")["step"]
        if function is a_folder:
            assert str(step) == (folder / "custom" / "step.txt").read_text()
            assert 20 << 20 == manifest.files["custom/deep/big.bin"].size


@pytest.mark.parametrize("beside", [False, True])
def test_its_failure_ends_the_run_and_leaves_nothing_half_made(beside, settings, scratch):
    def fails(model, step, path):
        path.write_text("half")
        if step == 4:
            raise RuntimeError("no more")

    args = settings(**EVERY_TWO, async_save=beside)
    with pytest.raises(CheckpointError, match="save_function failed at step 4: RuntimeError: no more") as failed:
        Trainer(tiny_llama(), args, train_dataset=rows(), save_function=fails).train()
    assert ("FG631", "save_function") == (failed.value.code, failed.value.argument)
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert ["checkpoint-2"] == sorted(entry.name for entry in Path(args.output_dir).glob("*checkpoint*"))


def test_nothing_is_left_where_there_is_no_memory_for_a_copy(settings, scratch, monkeypatch):
    def fails(*shape, **options):
        raise RuntimeError("out of memory")

    def function(model, step, path):
        a_folder(model, step, path)
        monkeypatch.setattr(torch, "empty", fails)

    args = settings(**EVERY_TWO, async_save=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        Trainer(tiny_llama(), args, train_dataset=rows(), save_function=function).train()
    assert [] == list(Path(args.output_dir).glob("*checkpoint*"))


def _with_a_function(folder, fails_on):
    def function(model, step, path):
        rank = torch.distributed.get_rank()
        if rank == fails_on:
            raise RuntimeError("not here")
        path.write_text(f"rank {rank}")

    trainer = make(folder, batch_size=2, ranks=2, save_strategy="steps", save_steps=4)
    trainer.save_function = function
    try:
        trainer.train()
    except CheckpointError as error:
        return error.message
    return None


def test_every_process_calls_it_and_fails_with_it(tmp_path):
    assert [None, None] == run_ranks(2, _with_a_function, tmp_path / "good", None)
    manifest = verify(tmp_path / "good" / "checkpoint-4")
    assert {"custom/rank-0", "custom/rank-1"} <= set(manifest.files)
    assert "rank 1" == (tmp_path / "good" / "checkpoint-4" / "custom" / "rank-1").read_text()
    first, second = run_ranks(2, _with_a_function, tmp_path / "bad", 1)
    assert first == second
    assert "rank 1: save_function failed at step 4" in first
    assert [] == list_checkpoints(tmp_path / "bad")


@pytest.mark.parametrize("storage", ["s3://bucket", object(), 7])
def test_what_is_no_storage_is_refused(storage, settings):
    with pytest.raises(TrainingError, match=r"which has no create\(\)") as refused:
        Trainer(tiny_llama(), settings(), storage=storage)
    assert ("FG632", "storage") == (refused.value.code, refused.value.argument)


def test_what_cannot_be_called_is_refused(settings):
    with pytest.raises(TrainingError, match="'save_function' is") as refused:
        Trainer(tiny_llama(), settings(), save_function="later")
    assert "FG819" == refused.value.code


CONFIG = """\
main: !call:forgather.ml:Trainer
  model: !call:mine.py:model
  train_dataset: !call:mine.py:data
  args: !call:forgather.ml:TrainingArguments
    output_dir: {folder}
    save_strategy: steps
    save_steps: 2
    max_steps: 2
    logging_strategy: "no"
    use_cpu: true
  storage: !singleton:mine.py:Counting [{folder}]
  save_function: !partial:mine.py:save {{note: from the config}}
"""
CODE = """\
from tests.ml.fixtures import rows as data, tiny_llama as model
from forgather.ml.checkpoint import LocalStorage

class Counting(LocalStorage):
    def __init__(self, folder):
        self.created = []

    def create(self, file):
        self.created.append(file.name)
        return super().create(file)

def save(model, step, path, note):
    path.write_text(f"{note}, step {step}")
"""


def test_a_config_names_both(tmp_path):
    folder = tmp_path / "out"
    project = make_project(
        tmp_path / "bench", {"templates/configs/a.yaml": CONFIG.format(folder=folder), "mine.py": CODE}
    )
    trainer = Project("a.yaml", str(project))()
    trainer.train()
    assert {"custom", "manifest.json"} <= set(trainer.storage.created)
    assert isinstance(trainer.storage, LocalStorage)
    verify(folder / "checkpoint-2")
    assert "from the config, step 2" == (folder / "checkpoint-2" / "custom").read_text()
