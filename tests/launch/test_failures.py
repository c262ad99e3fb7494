"""One process that fails ends all of them, and the first cause is told once: rank, phase, and what it was."""

import json
import re
import subprocess
import sys
import time

import pytest

from forgather.errors import ProjectError
from forgather.run_status import Status, read_status
from tests.matrix import thinned
from tests.patience import patience
from tests.project.workbench import ROOT, fgcli, make_project

TOY = """\
import os, signal, sys, time
import torch
import torch.distributed as dist

def fail(how):
    print(f"failing at {time.time()}", flush=True)
    if how == "raise":
        raise ValueError("of this rank")
    if how == "leave":
        os._exit(7)
    if how == "exit":
        sys.exit(5)
    if how == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    os.kill(os.getpid(), getattr(signal, how))

def work(environment, how, rank):
    environment.start(use_cpu=True)
    value = torch.zeros(3)
    dist.all_reduce(value)
    if environment.rank == rank:
        fail(how)
    dist.all_reduce(value)
    time.sleep(1000)
"""
CONFIG = """\
-- set how = how | default('raise')
meta: {nproc_per_node: 2, output_dir: out}
dynamic_args: [{names: --how, type: str}, {names: --rank, type: int}]
main: !partial:toy.py:work
  environment: !singleton:forgather.ml.distributed:DistributedEnvironment
    timeout_seconds: {{ 8 if how == 'hang' else 600 }}
    start_timeout_seconds: 30
  how: {{ how }}
  rank: {{ rank | default(0) }}
"""


@pytest.fixture
def bench(tmp_path):
    return make_project(tmp_path / "bench", {"toy.py": TOY, "templates/configs/a.yaml": CONFIG})


def failed(bench, how, rank):
    """Returns the run, and how many seconds after the failure it ended."""
    done = fgcli("-t", "a", "train", "--how", how, "--rank", str(rank), cwd=bench)
    begun = re.search(r"failing at ([\d.]+)", done.stdout + done.stderr)
    assert begun is not None, done.stderr
    return done, time.time() - float(begun[1])


@pytest.mark.parametrize(
    ("how", "rank", "status", "told"),
    thinned(
        [
            ("raise", 0, 1, "error: ValueError: of this rank"),
            ("raise", 1, 1, "error: ValueError: of this rank"),
            ("leave", 0, 7, "error[FG710]: rank 0 of 2 exited with status 7 in run, without an error message"),
            ("exit", 1, 5, "error[FG710]: rank 1 of 2 in run: ended with status 5"),
            ("SIGKILL", 1, 137, "error[FG710]: rank 1 of 2 was ended by SIGKILL in run, without an error message"),
            ("SIGSEGV", 0, 139, "error[FG710]: rank 0 of 2 was ended by SIGSEGV in run, without an error message"),
        ],
        lambda how, rank, status, told: (how, rank) == ("raise", 1),
    ),
)
def test_one_process_that_fails_ends_all_and_is_named(bench, how, rank, status, told):
    done, seconds = failed(bench, how, rank)

    assert status == done.returncode, done.stderr
    assert [told] == [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "Traceback" not in done.stderr
    assert seconds < patience(15)
    (run,) = (bench / "out" / "runs").glob("2*")
    found = read_status(str(run))
    died = rank == 0 and how in ("leave", "SIGSEGV")
    assert (Status.KILLED if died else Status.FAILED, rank) == (found.status, found.cause["rank"])
    assert found.cause["message"].replace(f"rank {rank} ", f"rank {rank} of 2 ") in told
    if how == "raise":
        assert f"note: rank {rank} of 2, run" in done.stderr
        assert "toy.py:8 in fail" in done.stderr
    if how == "SIGSEGV":
        assert re.search(r"crashed at File .*toy.py\", line 16 in fail", done.stderr), done.stderr


@pytest.mark.matrix
def test_a_process_that_hangs_is_found_explained_and_ended(bench):
    done, seconds = failed(bench, "hang", 1)

    assert 1 == done.returncode
    assert "Timed out waiting 8000ms" in done.stderr
    assert "note: rank 0 of 2, run" in done.stderr
    assert re.search(r"note: the others wait for rank 1: run, at .*toy.py:15 in fail", done.stderr), done.stderr
    assert seconds < patience(18)
    (report,) = (bench / "out" / "runs").glob("*/hang.txt")
    text = report.read_text()
    assert re.search(r"rank 0: run\n  last collective: all_reduce number 2 of shape \[\[3\]\]", text), text
    assert re.search(r"rank 1: run\n  last collective: all_reduce number 1 of shape \[\[3\]\]", text), text
    assert re.search(r"toy.py:15 in fail", text)


@pytest.mark.matrix
def test_a_failure_under_torchrun_is_told_once(bench):
    words = ["--standalone", "--nproc-per-node", "2", str(ROOT / "scripts" / "train_script.py")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "a", "--how", "raise", "--rank", "1"],
        cwd=bench,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )

    assert 1 == done.returncode
    assert 1 == done.stderr.count("error: ValueError: of this rank")
    assert re.search(r"Root Cause.*\n.*\n.*\n.*\n  rank      : 1 ", done.stderr), done.stderr  # torchrun's own table


def test_torchruns_table_shows_the_stack_of_a_program_and_the_words_of_an_error_of_ours(tmp_path):
    failure = pytest.importorskip("forgather.ml.distributed.root_cause")
    phase_module = pytest.importorskip("forgather.ml.distributed.phase")

    def shown(error):
        try:
            raise error
        except type(error) as raised:
            record = failure.record_of(raised, phase_module.RunPhase("run"), told=True)
            failure.write_record(tmp_path, record, raised)
        assert record == failure.read_record(tmp_path)
        told = json.loads((tmp_path / failure.RECORD).read_text())
        return told["message"]["extraInfo"]["py_callstack"]

    assert "in shown" in shown(KeyError("lr"))
    assert shown(ProjectError("one process too many", code="FG461")).startswith("ProjectError: [FG461] one process too")


def test_a_config_with_a_mistake_is_told_once_before_anything_starts(bench):
    (bench / "templates/configs/b.yaml").write_text("meta: {nproc_per_node: 2}\nmain: {a: 1}\n")
    done = fgcli("-t", "b", "train", cwd=bench)

    assert 1 == done.returncode
    assert 1 == done.stderr.count("error[")
    assert done.stderr.startswith("error[FG412]")


@pytest.mark.parametrize(
    ("error", "phase", "lasts"),
    [
        (TypeError("no such argument"), "construction", True),
        (ModuleNotFoundError("toy"), "construction", True),
        (TypeError("one odd row"), "forward and backward", False),
        (ConnectionError("the hub does not answer"), "construction", False),
        (MemoryError(), "construction", False),
    ],
)
def test_a_slip_in_what_is_constructed_would_end_each_attempt(error, phase, lasts):
    failure = pytest.importorskip("forgather.ml.distributed.root_cause")
    phase_module = pytest.importorskip("forgather.ml.distributed.phase")
    assert lasts is failure.record_of(error, phase_module.RunPhase(phase), told=True).lasts
