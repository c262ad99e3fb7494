"""What is no checkpoint that a run can go on from: one located sentence, and nothing is written or removed."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from forgather.cli.main import main
from forgather.errors import CheckpointError, TrainingError
from forgather.ml import Trainer
from tests.cli.checkpoint_folders import rewrite_manifest
from tests.ml.conftest import settings as make_settings
from tests.ml.fixtures import rows, tiny_llama
from tests.project.workbench import make_project

CONFIG = """\
args: &args !singleton:forgather.ml:TrainingArguments
  output_dir: {out}
  use_cpu: true
  max_steps: 4
  save_strategy: steps
  save_steps: 2
main: !singleton:forgather.ml:Trainer
  kwargs:
    model: !call:parts.py:model []
    args: *args
    train_dataset: !call:parts.py:rows []
"""
PARTS = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.ml.fixtures import rows, tiny_llama as model
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    args = make_settings.__wrapped__(tmp_path_factory.mktemp("saved"))
    args = args(save_strategy="steps", save_steps=2, max_steps=2)
    Trainer(tiny_llama(), args, train_dataset=rows()).train()
    return Path(args.output_dir) / "checkpoint-2"


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoint-2")


def listing(folder):
    return {
        file: (file.lstat().st_size, file.lstat().st_mtime_ns) for file in folder.rglob("*") if "out" not in file.parts
    }


def refused(folder, settings, match, model=tiny_llama, **given):
    """Asserts that a run refuses to go on from a folder, and changes nothing."""
    above = folder.parent
    before = listing(above) if above.is_dir() else None
    trainer = Trainer(model(), settings(max_steps=4, save_strategy="steps", **given), train_dataset=rows())
    with pytest.raises(CheckpointError, match=match) as caught:
        trainer.train(resume_from_checkpoint=str(folder))
    assert caught.value.hint and "\n" not in caught.value.message
    assert before is None or before == listing(above)


def cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def edit(folder):
    text = (folder / "trainer_state.json").read_text()
    (folder / "trainer_state.json").write_text(text.replace('"global_step": 2', '"global_step": 1'))


def halve(folder):
    for file in sorted(folder.iterdir())[::2]:
        if file.name != "manifest.json":
            file.unlink()


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (cut, r"FG603.*model.safetensors' is corrupt: it has \d+ bytes and \d+ were written"),
        (edit, "FG603.*trainer_state.json' is corrupt: its content is not what was written"),
        (halve, "FG604.*is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "FG602.*has no manifest.json, so it is incomplete"),
        (lambda folder: [file.unlink() for file in folder.iterdir()], "FG602"),
        (lambda folder: rewrite_manifest(folder, lambda body: body.update(format=3)), "FG670.*newer.*format 3"),
        (lambda folder: rewrite_manifest(folder, lambda body: body.update(format=1)), "FG670.*older.*format 1"),
    ],
    ids=["truncated", "edited", "half-copied", "without manifest", "empty", "newer", "older"],
)
def test_a_checkpoint_that_is_not_whole_is_refused(copy, settings, harm, match):
    harm(copy)
    refused(copy, settings, match)


def by_dcp(folder):
    from torch.distributed import checkpoint

    checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=folder, no_dist=True)


def by_accelerate(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.save_state(str(folder))


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize(
    ("write", "writer"),
    [
        (by_dcp, "torch.distributed.checkpoint"),
        (by_accelerate, r"accelerator.save_state\(\)"),
        (lambda folder: tiny_llama().save_pretrained(folder), "is a model without the state that a run needs"),
    ],
    ids=["DCP", "Accelerate", "a model"],
)
def test_a_checkpoint_of_another_program_is_named(tmp_path, settings, write, writer):
    folder = tmp_path / "foreign" / "checkpoint-1"
    folder.parent.mkdir()
    write(folder)
    refused(folder, settings, f"FG671.*{writer}")


def test_a_file_of_torch_save_is_not_loaded(tmp_path, settings):
    torch.save(tiny_llama().state_dict(), tmp_path / "model.pt")
    refused(tmp_path / "model.pt", settings, "FG601.*is a file, and a checkpoint is a folder; a file of torch.save")


def test_another_model_is_told_shape_by_shape(copy, settings):
    other = lambda: tiny_llama(hidden_size=16, intermediate_size=24)  # noqa: E731
    refused(
        copy,
        settings,
        r"FG605.*has shape \(\d+, 32\), not \(\d+, 16\); .*; and \d+ more",
        model=other,
        allow_changed=["model"],
    )
    deeper = lambda: tiny_llama(num_hidden_layers=3)  # noqa: E731
    refused(
        copy, settings, r"FG605.*'model.layers.2.*' is missing.*; and \d+ more", model=deeper, allow_changed=["model"]
    )


@pytest.mark.parametrize("name", ["nowhere", "file", "file/checkpoint-2", "dangling", "loop", "a\0b", "x" * 300])
def test_a_path_that_is_no_folder_is_refused(copy, settings, name):
    (copy.parent / "file").write_text("x")
    (copy.parent / "dangling").symlink_to("nothing")
    (copy.parent / "loop").symlink_to("loop")
    refused(copy.parent / name, settings, "FG601")


@pytest.mark.parametrize("name", ["a b", "é ü", "quote ' \" #", "{{ x }} %s %(y)d", "-rf", "line\nend"])
def test_a_name_with_odd_characters_is_a_name(saved, tmp_path, settings, name):
    folder = shutil.copytree(saved, tmp_path / name / "checkpoint-2")
    trainer = Trainer(tiny_llama(), settings(max_steps=3, output_dir=str(tmp_path / name)), train_dataset=rows())
    assert 3 == trainer.train(resume_from_checkpoint="auto").global_step
    (folder / "index.json").unlink()
    with pytest.raises(CheckpointError, match="FG604"):
        trainer.train(resume_from_checkpoint=str(folder))


def test_a_name_that_is_no_text_is_told(saved, tmp_path, settings):
    """The library that reads tensors takes texts alone."""
    folder = shutil.copytree(saved, tmp_path / "\udcff" / "checkpoint-2")
    refused(folder, settings, "FG601.*cannot be read: its path is not valid UTF-8")


@pytest.mark.parametrize("place", ["file", "file/out", "checkpoint-2/model.safetensors/out"])
def test_an_output_folder_that_cannot_be_is_refused_before_anything_is_written(copy, settings, place):
    (copy.parent / "file").write_text("x")
    before = listing(copy.parent)
    args = settings(output_dir=str(copy.parent / place), save_strategy="steps", max_steps=4)
    with pytest.raises(TrainingError, match="FG817.*cannot be written to"):
        Trainer(tiny_llama(), args, train_dataset=rows()).train()
    assert before == listing(copy.parent)


NOBODY = 65534


def as_nobody(act):
    """Returns what `act` gives in a process that may not do everything: tests may run as root, who may."""
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            act()
        except BaseException as error:  # noqa: BLE001 - told to the parent by the exit status
            sys.stderr.write(f"{error!r}\n")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_to_all(folder):
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for above in folder.parents:
        if any(place.name.startswith("pytest-") for place in (above, *above.parents)):
            above.chmod(0o755)


def test_a_checkpoint_that_may_not_be_read_is_refused_by_name(copy, settings):
    open_to_all(copy)
    trainer = Trainer(tiny_llama(), settings(max_steps=4), train_dataset=rows())

    def go_on(match):
        with pytest.raises(CheckpointError, match=match):
            trainer.train(resume_from_checkpoint=str(copy))

    (copy / "model.safetensors").chmod(0)
    as_nobody(lambda: go_on("FG603.*model.safetensors' is corrupt: it cannot be read .Permission denied"))
    copy.chmod(0)
    as_nobody(lambda: go_on("FG601.*cannot be read: Permission denied"))
    copy.chmod(0o755)


def test_a_folder_that_may_only_be_read_can_be_gone_on_from_but_not_written_to(copy, settings, tmp_path):
    open_to_all(copy)
    args = settings(max_steps=4, output_dir=str(copy.parent), save_strategy="steps", save_steps=2)
    copy.parent.chmod(0o555)
    before = listing(copy.parent)

    def saves():
        with pytest.raises(TrainingError, match="FG817.*Permission denied"):
            Trainer(tiny_llama(), args, train_dataset=rows()).train()

    def reads():
        elsewhere = settings(max_steps=4, output_dir=str(copy.parent), save_strategy="no")
        trainer = Trainer(tiny_llama(), elsewhere, train_dataset=rows())
        assert 4 == trainer.train(resume_from_checkpoint="auto").global_step

    as_nobody(saves)
    as_nobody(reads)
    assert before == listing(copy.parent)
    copy.parent.chmod(0o755)


def test_the_command_ends_with_one_report_and_starts_nothing_twice(saved, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    bench = make_project(tmp_path / "bench", {"parts.py": PARTS, "templates/configs/a.yaml": CONFIG.format(out=out)})
    monkeypatch.chdir(bench)
    broken = shutil.copytree(saved, out / "checkpoint-2")
    cut(broken)
    status = main(["train", "--resume", str(broken)])
    said = capsys.readouterr().err
    assert 1 == status and 1 == said.count("error[FG603]") and "Traceback" not in said
    assert 1 == main(["train", "--resume"])
    said = capsys.readouterr().err
    assert "error[FG607]: the only checkpoint in" in said and "Traceback" not in said
    shutil.copytree(saved, out / "checkpoint-1")  # under the name of another step: no checkpoint of that step
    assert 1 == main(["train", "--resume"])
    capsys.readouterr()
    shutil.rmtree(broken)
    shutil.move(out / "checkpoint-1", out / "checkpoint-2")
    assert 0 == main(["train", "--resume"])
    assert 4 == json.loads((out / "checkpoint-4/trainer_state.json").read_text())["global_step"]
