"""`fgcli train --resume` and `--allow-missing`: what a run goes on from is a value of its graph."""

import json
import os

import pytest

from forgather.cli.main import main
from forgather.cli.next_steps import resume_command
from forgather.project.fault_tolerance import resume_assignments
from forgather.project.project import Project
from tests.cli.checkpoint_folders import make_checkpoint
from tests.project.workbench import fgcli, make_project

TOY = """\
import json, os, signal
from forgather.errors import TrainingError
from forgather.interrupt import signal_handler

class Arguments:
    def __init__(self, output_dir, resume_from_checkpoint=None, allow_missing=None):
        self.output_dir, self.told = output_dir, [resume_from_checkpoint, allow_missing]

class Trainer:
    def __init__(self, args):
        self.args = args

    def train(self):
        if code := os.environ.get("ENDS"):
            raise TrainingError("it ended", code=code, hint="see to it")
        if "SIGNAL" in os.environ:
            with signal_handler():
                os.kill(os.getpid(), signal.SIGTERM)
        print("TOLD", os.environ.get("RANK", "0"), json.dumps(self.args.told), flush=True)
"""
ARGUMENTS = "args: &args !singleton:toy.py:Arguments\n  output_dir: out\n"
MAIN = "main: !singleton:toy.py:Trainer {kwargs: {args: *args }}\n"


@pytest.fixture
def bench(tmp_path, monkeypatch):
    configs = {
        "toy.py": TOY,
        "templates/configs/plain.yaml": ARGUMENTS + MAIN,
        "templates/configs/says.yaml": ARGUMENTS + "  resume_from_checkpoint: auto\n" + MAIN,
        "templates/configs/inside.yaml": "main: !singleton:toy.py:Trainer\n"
        "  kwargs:\n    args: !singleton:toy.py:Arguments {output_dir: out}\n",
        "templates/configs/option.yaml": "dynamic_args: [{names: --resume-from-checkpoint, type: str}]\n"
        + ARGUMENTS
        + "  resume_from_checkpoint: {{ resume_from_checkpoint | default('none') }}\n"
        + MAIN,
        "templates/configs/callable.yaml": "main: !partial:toy.py:print []\n",
    }
    folder = make_project(tmp_path / "bench", configs, meta="default_config: plain\n")
    monkeypatch.chdir(folder)
    (folder / "out/checkpoint-5").mkdir(parents=True)
    return folder


def told(capfd, *arguments):
    assert 0 == main(list(arguments))
    return [
        json.loads(line.split(" ", 2)[2]) for line in capfd.readouterr().out.splitlines() if line.startswith("TOLD")
    ]


@pytest.mark.parametrize("config", ["plain", "says", "inside"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--resume"], ["auto", None]),
        (["--resume", "auto"], ["auto", None]),
        (["--resume", "never"], [False, None]),
        (["--resume", "never", "--allow-missing", "optimizer,rng"], [False, ["optimizer", "rng"]]),
    ],
)
def test_the_trainer_is_told(bench, capfd, config, given, expected):
    assert [expected] == told(capfd, "-t", config, "train", *given)


def test_what_may_be_missing_goes_with_a_config_that_resumes(bench, capfd):
    assert [["auto", ["rng"]]] == told(capfd, "-t", "says", "train", "--allow-missing", "rng")


def test_a_folder_is_told_as_an_absolute_path_whatever_its_name(bench, capfd):
    odd = bench / 'out/check: "point" \n\t{{ x }} é #1'
    odd.mkdir()
    assert [[str(odd), None]] == told(capfd, "train", "--resume", os.path.relpath(odd))


def test_it_stands_in_the_record_of_the_run_and_is_repeated(bench, capfd):
    assert [["auto", ["data"]]] == told(capfd, "train", "--resume", "--allow-missing", "data")
    run = next((bench / "out/runs").glob("2*"))
    assert "args.resume_from_checkpoint" in (run / "overrides.yaml").read_text()
    assert "--resume" in json.loads((run / "run.json").read_text())["command"]
    assert [["auto", ["data"]]] == told(capfd, "rerun", str(run), "--anyway")


@pytest.mark.parametrize(
    ("config", "code", "expected"),
    [
        ("plain", "FG609", "see to it; to resume:  fgcli -t plain train --resume auto\n"),
        (
            "plain",
            "FG818",
            "see to it; to resume:  fgcli -t plain train --resume auto --set +args.bad_step_policy=skip\n",
        ),
        ("inside", "FG650", "train --resume auto --set +main.args.bad_step_policy=skip\n"),
        ("plain", "FG651", "see to it\n"),
        ("plain", "FG817", "see to it\n"),
    ],
)
def test_an_error_that_a_run_can_go_on_after_says_how(bench, capfd, monkeypatch, config, code, expected):
    monkeypatch.setenv("ENDS", code)
    assert 1 == main(["-t", config, "train", "--resume", "out/checkpoint-5"])
    assert expected in capfd.readouterr().err
    (bench / "out/checkpoint-5").rmdir()
    assert 1 == main(["-t", config, "train"])
    assert "see to it\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing was trained yet, so there is nothing to save\n"),
        (["--resume"], "out/checkpoint-5 is unchanged\nto resume:  fgcli train --resume\n"),
        (["--resume", "odd"], "odd is unchanged\nto resume:  fgcli train --resume odd\n"),
    ],
)
def test_a_signal_before_the_first_step_of_a_resumed_run_leaves_its_checkpoint(bench, capfd, monkeypatch, words, told):
    (bench / "odd").mkdir()
    monkeypatch.setenv("SIGNAL", "1")
    assert 143 == main(["train", *words])
    assert told in capfd.readouterr().err


def test_the_checkpoint_that_stays_is_that_of_the_last_run_whatever_its_step(bench, capfd, monkeypatch):
    make_checkpoint(bench / "out", 100, run="aaaa")
    make_checkpoint(bench / "out", 50, run="bbbb")
    monkeypatch.setenv("SIGNAL", "1")
    assert 143 == main(["train", "--resume"])
    assert "out/checkpoint-50 is unchanged" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--resume --set args.output_dir=out", "--set args.output_dir=out --resume auto"),
        ("--set args.output_dir=out --resume", "--set args.output_dir=out --resume auto"),
        ("--resume=never --json", "--json --resume auto"),
        ("--nproc-per-node 2 -- --tee 3", "--nproc-per-node 2 --resume auto -- --tee 3"),
        ("--resume -- --tee 3", "--resume auto -- --tee 3"),
    ],
)
def test_the_command_that_goes_on_keeps_all_other_words_where_they_belong(bench, words, expected):
    command = ["fgcli", "train", *words.split()]
    assert f"fgcli train {expected}" == resume_command(Project("plain", bench), command)


@pytest.mark.matrix
def test_it_works_in_several_processes(bench):
    done = fgcli("train", "--resume", "out/checkpoint-5", "--nproc-per-node", "2", cwd=bench)
    lines = [line.split(" ", 2) for line in (done.stdout + done.stderr).splitlines() if "TOLD" in line]
    assert 0 == done.returncode, done.stderr
    assert {json.dumps([str(bench / "out/checkpoint-5"), None])} == {line[2] for line in lines}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["train", "--resume", "out/checkpoint-6"], "FG601"),
        (["train", "--resume", ""], "FG601"),
        (["-t", "callable", "train", "--resume"], "FG676"),
        (["-t", "callable", "train", "--allow-missing", "rng"], "FG676"),
        (["-t", "plain", "train", "--allow-missing", "rng"], "FG676"),
        (["-t", "option", "train", "--resume", "auto", "--resume-from-checkpoint", "auto"], "FG676"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_before_anything_is_written(bench, capsys, arguments, code):
    assert 1 == main(arguments)
    said = capsys.readouterr().err
    assert f"error[{code}]" in said and "help:" in said
    assert not (bench / "out/runs").exists()


def test_a_checkpoint_that_is_named_without_its_folder_is_found_for_the_hint(bench, capsys):
    make_checkpoint(bench / "out", 5)
    assert 1 == main(["-t", "plain.yaml", "train", "--resume", "checkpoint-5"])
    assert f"help: did you mean {os.path.join('out', 'checkpoint-5')!r}?" in capsys.readouterr().err


def test_a_link_to_nothing_is_named_as_such(bench, capsys):
    os.symlink("nothing", bench / "link")
    assert 1 == main(["train", "--resume", "link"])
    assert "'link' is a broken link" in capsys.readouterr().err


def test_the_way_to_go_on_is_printed_with_the_same_option(bench):
    graph = Project("plain", bench).graph
    assert (("+args.resume_from_checkpoint", '"auto"'),) == resume_assignments(graph, "auto", {})
    assert () == resume_assignments(graph, None, {})


def test_a_part_that_does_not_exist_is_found_before_the_run(tmp_path, capsys, monkeypatch):
    config = "args: &args !singleton:forgather.ml:TrainingArguments\n  output_dir: out\n" + MAIN
    monkeypatch.chdir(make_project(tmp_path / "bench", {"toy.py": TOY, "templates/configs/a.yaml": config}))
    assert 1 == main(["train", "--resume", "--allow-missing", "optimiser"])
    said = capsys.readouterr().err
    assert "FG813" in said and "a list of: optimizer, schedule, data, rng, meter, progress" in said
    assert not (tmp_path / "bench/out").exists()
