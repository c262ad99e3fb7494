"""What else may lie where checkpoints are written and read: it is told, it stays, and nobody waits for it."""

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers.trainer_callback import ExportableState

from forgather.cli.main import main
from forgather.errors import CheckpointError, TrainingError
from forgather.interrupt import Terminated
from forgather.ml import Trainer
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.checkpoint import newest_verified
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.retention import Retention
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.trainer.checkpoint_writer import SpaceNeeded, refuse_lack_of_space
from forgather.ml.trainer.model_export import check_writable
from forgather.ml.trainer.rewind import SKIPPED, read_skipped
from tests.cli.checkpoint_folders import make_checkpoint
from tests.ml.fixtures import regression_rows, rows, tiny_llama
from tests.reliability.faults import Faulty
from tests.reliability.job import trainer

KINDS = ("synchronous", "asynchronous")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_link_in_the_place_of_a_checkpoint_points_to_stays(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/precious").write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoint-3").symlink_to(tmp_path / "elsewhere")
    trainer(out, kind).train()
    assert "mine" == (tmp_path / "elsewhere/precious").read_text()
    names = ["checkpoint-3", "checkpoint-3.aside", "checkpoint-6", "checkpoint-9"]
    assert names == sorted(path.name for path in out.glob("*check*"))
    assert ["checkpoint-3.aside"] == [path.name for path in out.iterdir() if path.is_symlink()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_in_the_place_of_a_checkpoint_stays(tmp_path, kind):
    (tmp_path / "checkpoint-6").write_text("mine")
    with pytest.raises(CheckpointError, match=r"FG609.*checkpoint-6': a file has that name"):
        trainer(tmp_path, kind).train()
    assert "mine" == (tmp_path / "checkpoint-6").read_text()
    assert newest_verified(tmp_path)[0] == tmp_path / "checkpoint-3"
    assert ["checkpoint-3", "checkpoint-6"] == sorted(path.name for path in tmp_path.iterdir())


class Forgetful(LocalStorage):
    def rename(self, old, new):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_that_renames_nothing_is_told(tmp_path, kind):
    with pytest.raises(CheckpointError, match=r"FG609.*step 3 .*the storage did not rename it"):
        trainer(tmp_path, kind, storage=Forgetful()).train()


@pytest.mark.parametrize("value", [torch.ones(2), {1}, b"", {(1, 2): 3}], ids=lambda value: type(value).__name__)
def test_a_callback_whose_state_is_no_json_is_named(tmp_path, value):
    class Counts(TrainerCallback, ExportableState):
        def state(self):
            return {"args": {}, "attributes": {"value": value}}

    with pytest.raises(CheckpointError, match="FG606.*the callback Counts cannot be stored as JSON"):
        trainer(tmp_path, "synchronous", callbacks=[Counts()]).train()
    assert [] == list(tmp_path.iterdir())


def replaced_by_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "training_args.json", "optimizer.json", "optimizer.safetensors"]
)
@pytest.mark.parametrize("command", ["ls", "verify", "show", "export"])
def test_no_command_waits_for_a_pipe_in_a_checkpoint(tmp_path, capsys, name, command):
    trainer(tmp_path, "synchronous", max_steps=3).train()
    replaced_by_a_pipe(tmp_path / "checkpoint-3" / name)
    into = [str(tmp_path / "exported")] if command == "export" else []
    place = tmp_path if command == "ls" else tmp_path / "checkpoint-3"
    # An exported model is whole without the state of the optimizer.
    is_needed = command != "export" or not name.startswith("optimizer")
    assert is_needed == main(["ckpt", command, str(place), *into])
    assert is_needed == ("is not a regular file" in "".join(capsys.readouterr()))


@pytest.mark.parametrize("name", ["optimizer.json", "optimizer.safetensors"])
def test_who_asks_for_a_state_that_is_a_pipe_is_told(tmp_path, name):
    trainer(tmp_path, "synchronous", max_steps=3).train()
    replaced_by_a_pipe(tmp_path / "checkpoint-3" / name)
    with pytest.raises(CheckpointError, match=rf"FG603.*{name}' is corrupt: it is not a regular file"):
        CheckpointReader(tmp_path / "checkpoint-3")


def test_a_survey_does_not_wait_for_a_pipe(tmp_path, capsys):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
        replaced_by_a_pipe(tmp_path / f"checkpoint-{step}/trainer_state.json")
    assert 1 == main(["ckpt", "ls", str(tmp_path)])
    assert 0 == main(["ckpt", "prune", str(tmp_path), "--keep-last", "1", "--yes"])
    assert 2 == len(list(tmp_path.iterdir()))


@pytest.mark.parametrize(
    "text", [None, '{"run": "a", "steps": [{"epoch": 1e999, "first": 0, "end": 1}]}', "[" * 100_000, "[]", "5"]
)
def test_a_list_of_steps_left_out_that_is_none_is_told(tmp_path, text):
    if text is None:
        os.mkfifo(tmp_path / SKIPPED)
    else:
        (tmp_path / SKIPPED).write_text(text)
    with pytest.raises(CheckpointError, match="FG653"):
        read_skipped([tmp_path], "a")


def test_a_limit_beyond_every_number_is_one_like_others():
    need = SpaceNeeded(checkpoint=100, model=10, steps=range(10, 1001, 10))
    with pytest.raises(CheckpointError, match="FG630") as refused:
        refuse_lack_of_space(need, Retention(last=10**23), Path("out"), 720)
    assert "save_total_limit: 6 would fit" in refused.value.hint


def test_rows_that_have_become_a_stream_are_refused(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(regression_rows(40))

    trainer(tmp_path, "synchronous", max_steps=3).train()
    later = trainer(tmp_path, "synchronous")
    later.train_dataset = Stream()
    with pytest.raises(CheckpointError, match="FG610.*num_rows 8, now None"):
        later.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("name", "value"), [("spike_window", 10**23), ("logging_dir", "a\0b")])
def test_values_that_no_machine_takes_are_refused(tmp_path, name, value):
    with pytest.raises(TrainingError, match=f"FG813.*{name}"):
        trainer(tmp_path, "synchronous", **{"spike_threshold": 2.0, name: value})


class HearsASignal(torch.optim.lr_scheduler.ConstantLR):
    """Hears a signal in the middle of being put back, in code that makes another exception of it."""

    def load_state_dict(self, state):
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None


def test_a_signal_while_a_checkpoint_is_read_is_no_fault_of_the_checkpoint(settings):
    args = settings(max_steps=4, save_strategy="steps", save_steps=2)

    def made():
        return Trainer(tiny_llama(), args, train_dataset=rows(), lr_scheduler_factory=HearsASignal)

    made().train()
    with pytest.raises(Terminated):
        made().train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-2"))


def test_what_a_kill_in_the_look_at_a_folder_has_left_goes_with_the_next_look(tmp_path):
    look = Faulty()
    check_writable(look, tmp_path)
    ((_, probe),) = [act for act in look.operations if act[0] == "create"]
    probe.touch()
    check_writable(LocalStorage(), tmp_path)
    assert [] == list(tmp_path.iterdir())
