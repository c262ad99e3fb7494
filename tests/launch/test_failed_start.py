"""A start that fails leaves no run folder; a failure after training began, or a file of the user, keeps it."""

import json
import os
import re

import pytest

from forgather.cli.main import main
from tests.project.workbench import TINY_TRAINING, fgcli, make_project

TOY = """\
import os, pathlib, signal
from forgather.interrupt import current_handler

class Trainer:
    class args:
        output_dir = "out"

    def __init__(self, run_dir, at, writes=""):
        self.run_dir, self.at = pathlib.Path(run_dir), at
        if writes:
            (self.run_dir / writes).parent.mkdir(parents=True, exist_ok=True)
            (self.run_dir / writes).write_text("of the user")
        self.fail("construction")

    def train(self):
        current_handler().has_trainer = True
        self.fail("preparation")
        current_handler().begin()
        self.fail("step")

    def fail(self, at):
        if at == self.at:
            raise ValueError(at)

class Silent(Trainer):
    def train(self):
        self.fail("step")

def stop(run_dir):
    os.kill(os.getpid(), signal.SIGTERM)

def call():
    raise ValueError("step")

def fail_on_rank_1(run_dir):
    if os.environ["RANK"] == "1":
        raise ValueError("construction")
    return print
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "bench", {"toy.py": TOY})
    monkeypatch.chdir(folder)
    return folder


def kept(bench, text, *arguments):
    """Returns the run folders that a run of this config leaves."""
    config = bench / "templates/configs/a.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(text)
    assert 1 == main(["-t", "a", "train", *arguments])
    return list(bench.glob("o*/**/runs/2*"))


@pytest.mark.parametrize(
    ("target", "remains"),
    [
        ("!singleton:toy.py:Trainer {run_dir: !var run_dir , at: construction}", False),
        ("!singleton:toy.py:Trainer {run_dir: !var run_dir , at: preparation}", False),
        ("!singleton:toy.py:Missing", False),
        ("!singleton:builtins:dict", False),
        ("!singleton:toy.py:Trainer {run_dir: !var run_dir , at: step}", True),
        ("!singleton:toy.py:Silent {run_dir: !var run_dir , at: step}", True),
        ("!partial:toy.py:call []", True),
    ],
)
def test_only_a_failure_before_training_removes_the_run_folder(bench, target, remains):
    found = kept(bench, f"main: {target}\n", "--no-check")

    assert remains is bool(found)


def test_a_signal_during_construction_removes_the_run_folder(bench, capsys):
    (bench / "templates/configs").mkdir(parents=True)
    (bench / "templates/configs/a.yaml").write_text("main: !singleton:toy.py:stop [!var run_dir ]\n")

    assert 143 == main(["-t", "a", "train", "--json"])
    assert json.loads(capsys.readouterr().out)["run_dir"] is None
    assert [] == list(bench.glob("output_models/a/runs/2*"))


def test_a_rerun_that_a_signal_ends_during_construction_names_no_folder(bench, capsys, monkeypatch):
    code = "\ndef stop_later(run_dir):\n    if 'STOP' in os.environ:\n        stop(run_dir)\n    return print\n"
    (bench / "toy.py").write_text(TOY + code)
    (bench / "templates/configs").mkdir(parents=True)
    (bench / "templates/configs/a.yaml").write_text("main: !singleton:toy.py:stop_later [!var run_dir ]\n")
    assert 0 == main(["-t", "a", "train", "--json"])
    first = json.loads(capsys.readouterr().out)["run_dir"]
    monkeypatch.setenv("STOP", "1")

    assert 143 == main(["rerun", first, "--json"])
    assert json.loads(capsys.readouterr().out)["run_dir"] is None


@pytest.mark.parametrize("file", ["notes.txt", "config.yaml", "templates/own/notes.txt"])
def test_a_folder_with_a_file_of_the_user_stays_whole(bench, file):
    text = f"main: !singleton:toy.py:Trainer {{run_dir: !var run_dir , at: construction, writes: {file}}}\n"
    (folder,) = kept(bench, text)

    assert "of the user" == (folder / file).read_text()
    assert (folder / "run.json").exists()


def test_a_folder_with_a_link_stays_and_so_does_what_it_points_to(bench):
    (bench / "own").mkdir()
    (bench / "own" / "data.txt").write_text("of the user")
    code = "\ndef link(run_dir):\n    os.symlink('../../../own', run_dir + '/own')\n    raise ValueError\n"
    (bench / "toy.py").write_text(TOY + code)
    (folder,) = kept(bench, "main: !singleton:toy.py:link [!var run_dir ]\n")

    assert (folder / "own").is_symlink()
    assert (folder / "run.json").exists()
    assert "of the user" == (bench / "own" / "data.txt").read_text()


def test_earlier_runs_of_the_same_output_folder_stay(bench):
    (earlier,) = kept(bench, "main: !partial:toy.py:call []\n")
    assert [earlier] == kept(bench, "main: !singleton:toy.py:Missing\n", "--no-check")


@pytest.mark.parametrize(
    ("rows", "arguments", "code"),
    [
        ('{"text": "one two three"}\n', ["--resume", "nowhere"], "FG601"),
        ("", [], "FG8"),
    ],
)
def test_the_trainer_leaves_no_folder_of_a_start_that_fails(bench, capsys, rows, arguments, code):
    (bench / "rows.jsonl").write_text(rows)

    assert [] == kept(bench, TINY_TRAINING, *arguments)
    assert code in capsys.readouterr().err


@pytest.mark.distributed
def test_a_data_file_that_is_missing_is_reported_once_with_its_place(bench, capsys):
    source = "rows: &rows !singleton:forgather.ml.data:json_lines {paths: a.jsonl}\nmain: !partial:print [*rows]\n"
    make_project(bench, {"templates/configs/missing.yaml": source})
    arguments = ["-t", "missing.yaml", "train", "--set", "rows.paths=nowhere.jsonl"]

    assert 0 == main([*arguments, "--dry-run"])
    assert "'nowhere.jsonl' matches no file\n  --> <command line>:1\n  in  rows.paths" in capsys.readouterr().err
    assert 1 == main(arguments)
    assert ["error[FG830]"] == re.findall(r"(.*): 'nowhere.jsonl' matches", capsys.readouterr().err)


@pytest.mark.matrix
def test_one_of_two_processes_that_fails_during_construction_leaves_no_folder(bench):
    text = "meta: {nproc_per_node: 2, output_dir: out}\nmain: !singleton:toy.py:fail_on_rank_1 [!var run_dir ]\n"
    config = bench / "templates/configs/a.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(text)
    done = fgcli("-t", "a", "train", cwd=bench)

    assert 1 == done.returncode
    assert "ValueError: construction" in done.stderr
    assert [".lock"] == os.listdir(bench / "out" / "runs")
