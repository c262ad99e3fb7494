"""Real processes: `fgcli train` starts them, torchrun starts them; one run folder, one process that writes and prints."""

import json
import os
import subprocess
import sys

import pytest

from forgather.cli.main import main
from forgather.errors import ProjectError
from forgather.launch.multi_process import refuse_two_launchers
from forgather.run_status import Status, read_status
from tests.patience import patience
from tests.project.workbench import ROOT, fgcli, make_project

TOY = """\
import atexit, os
import torch
import torch.distributed as dist

class Last:
    def __del__(self, note=os.open("torn_down", os.O_CREAT | os.O_WRONLY), write=os.write):
        write(note, b"x")

last = Last()

def add(environment, run_dir):
    atexit.register(lambda: open(f"{run_dir}/handled.{environment.rank}", "w").close())
    environment.start(use_cpu=True)
    ranks = torch.tensor(float(environment.rank))
    dist.all_reduce(ranks)
    print(f"ranks add to {ranks.item():g} of {environment.world_size} in {run_dir}", flush=True)
    environment.shutdown()
    return 0
"""
CONFIG = """\
meta: {nproc_per_node: 2, output_dir: out}
main: !partial:toy.py:add
  environment: !singleton:forgather.ml.distributed:DistributedEnvironment
    timeout_seconds: 20
    start_timeout_seconds: 20
  run_dir: !var run_dir
"""


@pytest.fixture
def bench(tmp_path):
    return make_project(tmp_path / "bench", {"toy.py": TOY, "templates/configs/a.yaml": CONFIG})


def folder_of_all(done, bench):
    """Returns the one run folder, which every rank has seen; the standard output is that of rank 0 alone."""
    (folder,) = (path for path in (bench / "out" / "runs").iterdir() if path.is_dir())
    line = f"ranks add to 1 of 2 in {folder}\n"
    assert (line, 1) == (done.stdout, done.stderr.count(line))
    return folder


@pytest.mark.matrix
def test_train_starts_as_many_processes_as_the_config_says(bench):
    done = fgcli("-t", "a", "train", cwd=bench)

    assert 0 == done.returncode, done.stderr
    folder = folder_of_all(done, bench)
    assert done.stderr.startswith(f"run folder out/runs/{folder.name}\n")
    assert 2 == done.stderr.count("\n")
    # A thread of a process group that lets go of a tensor while the interpreter is torn down aborts the process.
    assert ["handled.0", "handled.1"] == sorted(path.name for path in folder.glob("handled.*"))
    assert b"" == (bench / "torn_down").read_bytes()


@pytest.mark.matrix
def test_a_run_is_repeated_in_as_many_processes_as_it_had(bench):
    keeps = "    with open(f'{run_dir}/loss.jsonl', 'a') as file:\n        file.write(f'{ranks.item()}\\n')\n"
    # The first process compares the files: by then all have written.
    keeps += "    torch.distributed.barrier()\n"
    text = (bench / "toy.py").read_text().replace("    environment.shut", f"{keeps}    environment.shut")
    (bench / "toy.py").write_text(text)
    config = bench / "templates/configs/a.yaml"
    config.write_text(config.read_text().replace("nproc_per_node: 2", "nproc_per_node: 1"))
    started = fgcli("-t", "a", "train", "--nproc-per-node", "2", cwd=bench)
    assert 0 == started.returncode, started.stderr
    (first,) = (path for path in (bench / "out" / "runs").iterdir() if path.is_dir())
    assert started.stdout == f"ranks add to 1 of 2 in {first}\n"
    assert started.stderr.startswith(f"run folder out/runs/{first.name}\n")
    # A thread of a process group that lets go of a tensor while the interpreter is torn down aborts the process.
    assert ["handled.0", "handled.1"] == sorted(path.name for path in first.glob("handled.*"))
    assert b"" == (bench / "torn_down").read_bytes()
    assert {"total": 2, "per_node": 2} == json.loads((first / "run.json").read_text())["processes"]

    done = fgcli("rerun", str(first), cwd=bench)

    assert 0 == done.returncode, done.stderr
    (second,) = (bench / "out" / "reruns").glob("*/runs/2*")
    assert {"total": 2, "per_node": 2} == json.loads((second / "run.json").read_text())["processes"]
    assert [Status.FINISHED] * 2 == [read_status(str(folder)).status for folder in (first, second)]
    assert done.stdout == f"ranks add to 1 of 2 in {second}\n"
    assert "processes   2, as in the first run\n" in done.stderr
    assert done.stderr.count("output folder: ") == 1
    assert done.stderr.endswith("loss file   identical bytes, 2 lines\n")


@pytest.mark.matrix
def test_torchrun_is_in_charge_where_it_started_the_processes(bench):
    words = ["--standalone", "--nproc-per-node", "2", str(ROOT / "scripts" / "train_script.py"), "a"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=bench,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )

    assert 0 == done.returncode, done.stderr
    assert (folder_of_all(done, bench) / "run.json").is_file()
    assert 1 == done.stderr.count("run folder out/runs/")


def test_the_plan_tells_the_processes_and_starts_none(bench):
    done = fgcli("-t", "a", "train", "--dry-run", "--nproc-per-node", "gpu", cwd=bench)

    assert "processes   one for each GPU  (--nproc-per-node)\n" in done.stdout
    assert not (bench / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--", "--bogus", "3"], "FG463", "torchrun does not accept these arguments: unrecognized arguments: --bogus"),
        (["--", "foo"], "FG463", "torchrun would start 'foo' as the program"),
        (["--nproc-per-node", "xpu"], "FG466", "--nproc-per-node is xpu, and this machine has none"),
    ],
)
def test_what_cannot_be_started_is_one_sentence(bench, capfd, words, code, message):
    assert 1 == main(["-p", str(bench), "-t", "a", "train", *words])
    told = capfd.readouterr().err
    assert told.startswith(f"error[{code}]: {message}"), told


def test_a_busy_port_is_one_sentence(bench, capfd):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status = main(["-p", str(bench), "-t", "a", "train", "--master-port", str(port)])

    told = capfd.readouterr().err.split("\n")[0]
    assert (1, f"error[FG464]: the port of 127.0.0.1:{port} is in use") == (status, told)


def test_a_script_is_printed_and_nothing_started(bench):
    done = fgcli("-t", "a", "train", "--print", "torchrun", cwd=bench)

    assert "torchrun --nproc-per-node=2 --standalone -m forgather -t a train\n" in done.stdout
    assert not (bench / "out").exists()


def test_several_tasks_on_a_machine_that_each_start_processes_are_refused():
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8"}
    environ = {**step, "TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}

    with pytest.raises(ProjectError, match="8 tasks on this machine, and each of them 8 processes: 64") as caught:
        refuse_two_launchers(environ)

    assert "FG468" == caught.value.code
    refuse_two_launchers(step)
