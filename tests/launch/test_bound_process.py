"""Processes that a run starts next to itself: none of them outlives the run, even if that one is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from forgather.launch.bound_process import BoundProcess
from tests.patience import patience
from tests.project.workbench import make_project

# Writes who it is, and waits for a signal. It is called where a run would build its trainer.
TOY = """\
import os, subprocess, sys, time

class Arguments:
    def __init__(self, **settings): pass

def hang(args=None):
    worker = subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(90)"])
    with open("pids.draft", "w") as stream:
        stream.write(f"{os.getpid()} {worker.pid}")
    os.rename("pids.draft", "pids")
    time.sleep(90)
"""
CONFIG = """\
main: !singleton:toy.py:hang
    kwargs:
        args: !singleton:toy.py:Arguments {per_device_train_batch_size: 8, auto_find_batch_size: true}
"""
TRIAL = """
from forgather.launch.batch_trial import confirmed_rows
from forgather.project.project import Project
confirmed_rows(Project("one"))
"""
# The words of a plan are replaced by those of another command that builds the run, because a plan imports torch first.
PLAN = """
import sys, time
from forgather.launch.plan_check import PlanCheck
from forgather.launch.planning import Device
from forgather.planner.hardware import Hardware
words = "import sys, runpy; sys.argv[1:] = '-t one construct main'.split(); runpy.run_module('forgather', run_name='__main__')"
check = PlanCheck([sys.executable, "-c", words], Device(Hardware(name="x", title="x")), ".", print)
time.sleep(90)
"""


# The cell of a benchmark is replaced by another module, because a cell imports torch first.
CELL = """
import os, sys
import forgather.launch.benchmark_run as run
run._CELL = "toy_cell"
os.environ["PYTHONPATH"] = os.getcwd()
run._measured({{"gpu_count": {processes}, "distributed_strategy": "DDP"}}, use_cpu=True, steps=1, timeout=600)
"""
TOY_CELL = """\
import os, sys, time
assert len(sys.argv) == 2 and os.path.isfile(f"{sys.argv[1]}/asked.json")
with open(f"pid {os.getpid()}", "w"):
    time.sleep(600)
"""


# A worker is forked from the run after it has started a process, and lives longer than the run.
FORKING = """
import os, subprocess, sys, time
from forgather.launch.bound_process import BoundProcess
code = "from forgather.launch.bound_process import end_with_parent; end_with_parent(); import time; time.sleep(90)"
bound = BoundProcess([sys.executable, "-c", code], env=os.environ, stdout=subprocess.DEVNULL, stderr=None)
worker = os.fork()
if worker:
    print(bound.pid, worker, flush=True)
time.sleep(90)
"""


# As torchrun starts a process of a run: in a session of its own.
LAUNCHING = """
import os, subprocess, sys, time
worker = "from forgather.launch import bound_process; bound_process._WATCHDOG_SECONDS = 0.1\\n"
worker += "import sys, time; {}; bound_process.end_with_launcher(); time.sleep(90)"
words = [sys.executable, "-c", worker]
variables = {{**os.environ, "FORGATHER_LAUNCHER_PROCESS": str(os.getpid())}}
started = subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, start_new_session={})
print(started.pid, flush=True)
time.sleep(90)
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as stream:
        return stream.read().split()


def wait_until(condition, seconds=5):
    until = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)


@pytest.mark.parametrize("code", [TRIAL, PLAN], ids=["trial", "plan"])
def test_what_a_killed_run_has_started_ends_with_it(tmp_path, monkeypatch, code):
    folder = make_project(tmp_path / "bench", {"toy.py": TOY, "templates/configs/one.yaml": CONFIG})
    monkeypatch.setenv("FORGATHER_TRUST", f"{folder}/")
    run = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    wait_until(lambda: (folder / "pids").exists() or run.poll() is not None)
    pids = (folder / "pids").read_text().split()
    assert all(map(is_running, pids))
    run.kill()
    run.wait()
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_cell_of_a_killed_benchmark_ends_with_it(tmp_path, processes):
    (tmp_path / "toy_cell.py").write_text(TOY_CELL)
    run = subprocess.Popen([sys.executable, "-c", CELL.format(processes=processes)], cwd=tmp_path)
    wait_until(lambda: len([*tmp_path.glob("pid *")]) == processes or run.poll() is not None, seconds=30)
    pids = [file.name.split()[1] for file in tmp_path.glob("pid *")]
    assert processes == len(pids) and all(map(is_running, pids))
    started = children_of(run.pid)
    assert started
    run.kill()
    run.wait()
    # torchrun ends after its processes.
    wait_until(lambda: not any(map(is_running, [*pids, *started])), seconds=30)


@pytest.mark.parametrize("has_session", [True, False])
@pytest.mark.parametrize("before", ["0", "sys.stdin.read()"], ids=["later", "before it has imported anything"])
def test_a_process_of_a_run_ends_with_its_launcher(before, has_session):
    """The pipe of the standard input ends with the launcher. Without a session, others of the group go on."""
    code = LAUNCHING.format(before, has_session)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0) as run:
        bystander = subprocess.Popen(["sleep", "90"], process_group=run.pid)
        worker = int(run.stdout.readline())
        assert is_running(worker)
        run.kill()
    wait_until(lambda: not is_running(worker), seconds=10)
    assert is_running(bystander.pid)
    bystander.kill()
    bystander.wait()


def test_a_forked_worker_of_a_killed_run_keeps_nothing_alive():
    with subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE, text=True) as run:
        bound, worker = map(int, run.stdout.readline().split())
        run.kill()
    try:
        wait_until(lambda: not is_running(bound))
        assert is_running(worker)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_process_that_is_ended_takes_along_what_it_has_started(tmp_path):
    code = (
        "import subprocess, sys; request = sys.stdin.readline()\n"
        "from forgather.launch.bound_process import end_with_parent; end_with_parent()\n"
        "worker = subprocess.Popen([sys.executable, '-IS', '-c', 'import time; time.sleep(90)'])\n"
        "print(request.strip(), repr(sys.stdin.read()), worker.pid, flush=True); worker.wait()"
    )
    words = [sys.executable, "-c", code]
    process = BoundProcess(words, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, request="asked\n")
    request, rest, worker = process.stdout.readline().split()
    # After the request, the standard input is empty.
    assert ("asked", "''") == (request, rest)
    assert is_running(worker)
    process.end()
    wait_until(lambda: not is_running(worker))
    assert -signal.SIGKILL == process.returncode
    process.communicate()


def test_what_a_process_has_left_behind_ends_too():
    code = "import subprocess; print(subprocess.Popen(['sleep', '90']).pid, flush=True)"
    process = BoundProcess([sys.executable, "-IS", "-c", code], env=os.environ, stdout=subprocess.PIPE, stderr=None)
    with process:
        left = process.stdout.readline()
        process.wait()
        assert is_running(int(left))
        process.end()
    wait_until(lambda: not is_running(int(left)))
    assert 0 == process.returncode
