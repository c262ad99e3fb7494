"""What only a whole process shows: exit statuses, tracebacks, signals, pipes, and the training script."""

import os
import signal
import subprocess
import sys

import pytest

from forgather.cli.output import MAX_LINES
from tests.patience import patience
from tests.project.workbench import ROOT, fgcli, make_project

TOY = """\
import pathlib, time

class Trainer:
    class args:
        output_dir = "out"

    def __init__(self, run_dir, wait=0):
        self.run_dir, self.wait = run_dir, wait

    def train(self):
        pathlib.Path("out/checkpoint-1").mkdir(parents=True)
        print("training", flush=True)
        time.sleep(self.wait)

def explode(depth=6):
    if depth:
        return explode(depth - 1)
    raise RuntimeError("no memory\\nleft")

def leave(status):
    raise SystemExit(status)

class Talker(Trainer):
    def train(self):
        from rich.console import Console

        super().train()
        while not pathlib.Path("gone").exists():
            time.sleep(0.01)
        for number in range(1000):
            print("step", number)
            Console().print("loss", number)
        pathlib.Path("out/finished").touch()
"""


@pytest.fixture
def bench(tmp_path):
    configs = {
        "toy.py": TOY,
        "templates/configs/good.yaml": "main: !singleton:toy.py:Trainer {run_dir: !var run_dir }\n",
        "templates/configs/slow.yaml": "main: !singleton:toy.py:Trainer {run_dir: !var run_dir , wait: 60}\n",
        "templates/configs/talks.yaml": "main: !singleton:toy.py:Talker {run_dir: !var run_dir }\n",
        "templates/configs/resumes.yaml": "dynamic_args: [{names: --resume-from-checkpoint, type: str}]\n"
        "main: !singleton:toy.py:Trainer {run_dir: !var run_dir , wait: 60}\n",
        "templates/configs/bad.yaml": "main: !partial:toy.py:explode\n",
        "templates/configs/leave.yaml": "main: !partial:toy.py:leave [7]\n",
        "templates/configs/loops.yaml": "dynamic_args: [{names: --n, type: int}]\nmain: !partial:int [{{ n }}]\n",
    }
    return make_project(tmp_path / "bench", configs, meta="default_config: good\n")


def test_an_exception_of_the_run_is_shown_with_its_place_in_the_code(bench):
    done = fgcli("-t", "bad", "train", cwd=bench)

    assert 1 == done.returncode
    lines = done.stderr.rstrip().split("\n")[1:]
    assert ["error: RuntimeError: no memory", "  left", "  --> templates/configs/bad.yaml:1"] == lines[:3]
    assert "    toy.py:18 in explode" == lines[-2]
    assert any("outer frames hidden; FORGATHER_TRACEBACK=full shows all" in line for line in lines)
    assert MAX_LINES >= len(lines)
    assert "forgather/" not in done.stderr


def test_the_whole_traceback_can_be_asked_for(bench):
    done = fgcli("-t", "bad", "train", cwd=bench, env={"FORGATHER_TRACEBACK": "full"})

    assert "Traceback (most recent call last)" in done.stderr
    assert "forgather/launch/in_process.py" in done.stderr


def test_the_status_of_a_run_that_leaves_is_kept(bench):
    assert 7 == fgcli("-t", "leave", "train", cwd=bench).returncode


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("command", "go_on"),
    [
        (["-t", "slow", "train"], ""),
        (
            ["-t", "resumes", "train", "--resume-from-checkpoint", "my run/checkpoint-7"],
            "to resume:  fgcli -t resumes train --resume-from-checkpoint auto\n",
        ),
    ],
)
def test_ctrl_c_ends_with_130_and_says_what_was_saved_and_how_to_go_on(bench, command, go_on):
    process = subprocess.Popen(
        [sys.executable, "-m", "forgather", *command],
        cwd=bench,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert "training\n" == process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=patience(30))

    assert 130 == process.returncode
    assert error.endswith(f"interrupted; the state is saved in out/checkpoint-1\n{go_on}")


def test_a_reader_that_leaves_is_no_error(bench):
    big = "\n".join(f"k{n}: {'x' * 100}" for n in range(1000))
    (bench / "templates/configs/big.yaml").write_text(big)
    process = subprocess.Popen(
        [sys.executable, "-m", "forgather", "-t", "big", "pp"],
        cwd=bench,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        process.stdout.close()
        error = process.stderr.read()
        process.wait(timeout=patience(30))

    assert b"" == error


def script(*arguments, cwd, env=None):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train_script.py"), *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


def test_the_training_script_trains_a_config(bench):
    done = script("good.yaml", cwd=bench)

    assert (0, "training\n") == (done.returncode, done.stdout), done.stderr
    assert (bench / "out" / "checkpoint-1").is_dir()


def test_the_training_script_takes_a_project_and_options(bench, tmp_path):
    done = script("-p", "bench", "leave", "--set", "main[0]=5", cwd=tmp_path)

    assert 5 == done.returncode, done.stderr


def test_the_training_script_shows_the_options_of_the_config(bench):
    done = script("good", "--help", cwd=bench)

    assert 0 == done.returncode
    assert "--dry-run" in done.stdout


def test_one_process_of_a_launcher_trains(bench):
    done = script("good", cwd=bench, env={"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"})

    assert 0 == done.returncode, done.stderr


def test_a_process_that_was_not_told_where_the_others_are_says_so(bench):
    done = script("good", cwd=bench, env={"WORLD_SIZE": "2", "RANK": "0"})

    assert 1 == done.returncode
    assert done.stderr.startswith("error[FG706]: rank 0 of 2 cannot find the others")


@pytest.mark.matrix
def test_a_run_goes_on_when_nobody_reads_its_output_any_more(bench):
    words = [sys.executable, "-m", "forgather", "-t", "talks", "train"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=bench, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        while run.stdout.readline() != "training\n":
            pass
        run.stdout.close()
        (bench / "gone").touch()
        said = run.stderr.read()
        assert 0 == run.wait(patience(60)), said
    assert (bench / "out/finished").exists()
    assert 1 == said.count("the reader of the output is gone; the run continues")
    assert "Traceback" not in said


@pytest.mark.matrix
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_run_goes_on_where_its_output_cannot_be_written(bench):
    (bench / "gone").touch()
    words = [sys.executable, "-m", "forgather", "-t", "talks", "train"]
    with open("/dev/full", "w") as full:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=bench, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert (bench / "out/finished").exists()
    assert 1 == done.stderr.count("No space left on device; the run continues")
