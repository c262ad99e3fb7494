"""`fgcli train` says in status.json how each run ended, whatever its `main` is."""

import os

import pytest

from forgather.cli.main import main
from forgather.heartbeat import Heartbeat
from forgather.run_status import Status, read_status
from forgather.runs.run_table import read_table
from tests.matrix import thinned
from tests.project.workbench import make_project

TOY = """\
import json, os, pathlib, signal, time
from forgather.heartbeat import current_heartbeat
from forgather.interrupt import current_handler
from forgather.run_status import read_status


class State:
    global_step, max_steps = 3, 8


class Trainer:
    state = State()

    class args:
        output_dir = "out"

    def __init__(self, run_dir, how):
        self.run_dir, self.how = run_dir, how
        assert read_status(run_dir).status == "running", "it is written before construction"

    def train(self):
        current_handler().has_trainer = True
        current_handler().begin()
        act(self.how)


def act(how):
    if how == "raise":
        raise ValueError("bad row, api_key=hunter2secret")
    if how == "stop":
        current_handler().defers = False
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if how == "die":
        os._exit(3)
    if how.startswith("exit"):
        raise SystemExit(int(how[-1]))
    return 5 if how == "status" else None


def call(how):
    act(how)
    return 5 if how == "status" else 0


def in_construction(run_dir):
    raise ValueError("of the constructor")
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "bench", {"toy.py": TOY})
    (folder / "templates" / "configs").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def trained(bench, text):
    """Runs a config in a fork, and returns its exit status and the status of its only run, if there is one."""
    (bench / "templates/configs/a.yaml").write_text(f"meta: {{output_dir: out}}\nmain: {text}\n")
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = main(["-t", "a.yaml", "train"])
        except SystemExit as ended:
            code = ended.code
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    folders = [entry.path for entry in os.scandir(bench / "out" / "runs") if entry.is_dir()]
    return os.waitstatus_to_exitcode(status), [read_status(folder) for folder in folders]


TRAINER = "!singleton:toy.py:Trainer {{run_dir: !var run_dir , how: {}}}"
CALL = "!partial:toy.py:call [{}]"


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    thinned(
        [
            (TRAINER.format("end"), 0, (Status.FINISHED, None)),
            (TRAINER.format("raise"), 1, (Status.FAILED, "ValueError: bad row, api_key=")),
            (TRAINER.format("stop"), 143, (Status.INTERRUPTED, None)),
            (TRAINER.format("die"), 3, (Status.KILLED, None)),
            (CALL.format("end"), 0, (Status.FINISHED, None)),
            (CALL.format("status"), 5, (Status.FAILED, "'main' ended with status 5")),
            (CALL.format("raise"), 1, (Status.FAILED, "ValueError: bad row, api_key=")),
            (CALL.format("stop"), 143, (Status.INTERRUPTED, None)),
            (CALL.format("die"), 3, (Status.KILLED, None)),
            (CALL.format("exit 0"), 0, (Status.FINISHED, None)),
            (CALL.format("exit 4"), 4, (Status.FAILED, "'main' ended with status 4")),
            (TRAINER.format("exit 0"), 0, (Status.FINISHED, None)),
        ],
        # A trainer imports torch, which is most of the time of such a run.
        lambda text, code, expected: text.startswith("!partial") or code == 143,
    ),
)
def test_the_status_says_how_a_run_ended(bench, capfd, text, code, expected):
    ended, (found,) = trained(bench, text)
    status, cause = expected
    assert code == ended, capfd.readouterr().err
    assert status is found.status
    assert (found.cause is None) if cause is None else found.cause["message"].startswith(cause)
    assert "hunter2secret" not in str(found.cause)
    if text.startswith("!singleton") and status is not Status.KILLED:
        assert (3, 8) == (found.step, found.max_steps)
    (run,) = read_table(["."]).runs
    assert (status, found.cause and found.cause["message"]) == (run.status, run.cause)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, "finished"), (None, "finished"), (4, "SystemExit: 4"), ("no disk", "SystemExit: no disk")],
)
def test_an_exit_of_the_program_is_a_failure_only_with_a_status(tmp_path, code, expected):
    with pytest.raises(SystemExit), Heartbeat(str(tmp_path), started=1.0):
        raise SystemExit(code)
    found = read_status(str(tmp_path))
    assert expected == (found.cause["message"] if found.cause else found.status)


def test_a_run_that_fails_in_its_construction_leaves_no_folder_and_no_status(bench):
    assert (1, []) == trained(bench, "!singleton:toy.py:in_construction [!var run_dir ]")
