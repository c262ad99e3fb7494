"""The Ray driver on a stand-in of Ray: one command on each machine, signals passed on, failures of a machine.

The stand-in has the functions of Ray that the driver calls, with threads for actors; the driver runs in a process of
its own, because it handles signals. What real Ray does is recorded by scripts/oracles/ray_driver.py.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.patience import patience
from tests.runs.launch_cells import ROOT, Cell, printed

STAND_IN = ROOT / "tests/runs/ray_stand_in"
MACHINE = """
import json, os, signal, sys, time
rank = sys.argv[sys.argv.index("--node-rank") + 1] if "--node-rank" in sys.argv else "0"
def note(**found):
    with open(f"{rank}.json", "w") as stream: json.dump({"words": sys.argv[1:], **found}, stream)
def stop(number, _):
    note(signal=number)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
note(secret=os.environ.get("HF_TOKEN"), trust=os.environ.get("FORGATHER_TRUST"))
plan = json.loads(sys.argv[sys.argv.index("--plan") + 1])
time.sleep(plan[int(rank)][0])
if plan[int(rank)][1] < 0: os.kill(os.getpid(), -plan[int(rank)][1])
sys.exit(plan[int(rank)][1])
"""


@pytest.fixture
def cluster(tmp_path):
    """Starts the driver for machines of which each sleeps for some seconds and then ends with a status."""
    module = tmp_path / "lib" / "forgather_stand_in"
    module.mkdir(parents=True)
    (module / "__main__.py").write_text(MACHINE)

    def start(plan, nodes=2):
        code = (
            "import subprocess, sys\n"
            "from forgather.launch import ray_driver\n"
            "ray_driver.MODULE = 'forgather_stand_in'\n"
            f"sys.exit(ray_driver.start(['train', '--plan', {json.dumps(plan)!r}], handed=['--', '--tee', '3'], "
            f"folder={str(tmp_path)!r}, nodes={nodes}, resources={{'CPU': 1, 'GPU': 0}}, variables=['HF_TOKEN'], "
            "trust='/t'))\n"
        )
        path = os.pathsep.join([str(STAND_IN), str(tmp_path / "lib"), str(ROOT)])
        environ = {**os.environ, "PYTHONPATH": path, "HF_TOKEN": "hf_x"}
        return subprocess.Popen(
            [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return start


def noted(folder, rank):
    return json.loads((folder / f"{rank}.json").read_text())


def test_each_machine_gets_one_command_with_its_rank_and_the_address_of_the_first(cluster, tmp_path):
    driver = cluster([[0, 0], [0, 0]])
    out, err = driver.communicate(timeout=patience(60))
    assert (0, b"") == (driver.returncode, err)
    words = [noted(tmp_path, rank)["words"] for rank in (0, 1)]
    for rank, found in enumerate(words):
        assert ["--nnodes", "2", "--master-addr", "127.0.0.1"] == found[3:7]
        assert [str(rank), "--", "--tee", "3"] == found[-4:]
    assert words[0][8] == words[1][8] and 0 < int(words[0][8]) < 65536
    assert ("hf_x", "/t") == (noted(tmp_path, 1)["secret"], noted(tmp_path, 1)["trust"])
    assert b"hf_x" not in out


@pytest.mark.parametrize(("ends", "status"), [(3, 3), (-signal.SIGKILL, 137)])
def test_a_machine_that_fails_ends_the_others_and_its_status_is_that_of_the_job(cluster, tmp_path, ends, status):
    driver = cluster([[600, 0], [0.2, ends]])
    driver.communicate(timeout=patience(60))
    assert status == driver.returncode
    assert signal.SIGTERM == noted(tmp_path, 0)["signal"]


def test_a_signal_reaches_all_machines(cluster, tmp_path):
    driver = cluster([[600, 0], [600, 0]])
    end = time.monotonic() + patience(60)
    while not all((tmp_path / f"{rank}.json").exists() for rank in (0, 1)) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    driver.terminate()
    driver.communicate(timeout=patience(60))
    assert 143 == driver.returncode
    assert [signal.SIGTERM] * 2 == [noted(tmp_path, rank)["signal"] for rank in (0, 1)]


def test_a_lost_machine_ends_the_others(cluster, tmp_path):
    driver = cluster([[600, 0], ["lost", 0]])
    _, err = driver.communicate(timeout=patience(60))
    assert 1 == driver.returncode and b"a machine of the run is gone" in err
    assert signal.SIGTERM == noted(tmp_path, 0)["signal"]


def test_one_machine_needs_no_address(cluster, tmp_path):
    driver = cluster([[0, 0]], nodes=1)
    driver.communicate(timeout=patience(60))
    assert 0 == driver.returncode and "--nnodes" not in noted(tmp_path, 0)["words"]


def test_the_printed_program_starts_the_driver():
    code = printed(Cell("parallel", "ddp", 4), "ray")
    called = {}
    environment = {"__name__": "__main__"}
    source = code.replace("from forgather.launch.ray_driver import start", "")
    environment["start"] = lambda *words, **settings: called.update(words=words[0], **settings) or 0
    with pytest.raises(SystemExit) as ended:
        exec(compile(source, "job.py", "exec"), environment)
    assert 0 == ended.value.code
    assert (4, {"CPU": 8, "GPU": 2}, str(ROOT)) == (called["nodes"], called["resources"], called["folder"])
    assert ["-p", "projects/parallel", "-t", "ddp", "train"] == called["words"]


def test_real_ray_gave_the_run_of_torchrun():
    recorded = json.loads((ROOT / "tests/runs/recorded/ray.json").read_text())
    assert (2, 0, 2, True) == (
        recorded["machines"], recorded["status"], recorded["status_of_wrong_words"], recorded["same_weights_as_torchrun"],
    )  # fmt: skip
