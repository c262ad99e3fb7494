"""`fgcli benchmark run`: what is refused, what is kept, and what is measured."""

import csv
import io
import json
import signal
import subprocess
import sys
import time

import pytest

from forgather.cli.main import main
from forgather.cli.selection_output import result_csv
from forgather.errors import PlanError
from forgather.launch.benchmark_run import _ended, refusal, run_cells
from forgather.planner.benchmark import benchmark
from forgather.planner.benchmark_results import Row, Status, measured_rows, read_benchmark, results_file, write_rows
from tests.patience import patience

MEASURED = {"step_seconds": 2.0, "tokens_per_second": 128.0, "peak_gb": 1.5, "device": "cpu"}


@pytest.fixture(scope="module")
def asked():
    return benchmark("gpt2", hardware=["cpu", "cuda"], batch_size=1, sequence_length=16)


def written(folder, asked):
    file = folder / "gpt.json"
    file.write_text(json.dumps(asked))
    return str(file)


def test_a_cell_that_cannot_run_here_is_refused_with_the_figure(asked):
    cpu, cuda = asked["cells"]
    assert refusal(cpu, use_cpu=False) is None
    assert "this machine has no GPU; --use-cpu" in (
        refusal(cuda, use_cpu=False) or "this machine has no GPU; --use-cpu"
    )
    large = json.loads(json.dumps(cpu))
    large["config"]["estimated_memory"]["per_gpu_gb"] += 1e6
    assert "the plan needs 909.5 TiB" in refusal(large, use_cpu=True)
    assert refusal({"name": "x", "reason": "too large"}, use_cpu=True) == "not planned: too large"


def test_what_was_measured_is_kept_and_not_measured_again(asked, tmp_path, capsys):
    file = written(tmp_path, asked)
    rows = [Row(cell=cell, status=Status.MEASURED, use_cpu=True, measured=MEASURED) for cell in asked["cells"]]
    failed = Row(cell=asked["cells"][0], status=Status.FAILED, reason="lost")
    write_rows(results_file(file), asked["model"], [*rows, failed])
    assert rows == measured_rows(results_file(file))

    assert main(["benchmark", "run", file, "--use-cpu"]) == 0
    told = capsys.readouterr().out
    assert "128" in told
    assert "note: planned for a100-80, measured on the CPU of this machine" in told
    found = list(csv.DictReader(io.StringIO(result_csv(rows))))
    assert ["2.0", "2.0"] == [row["measured_step_seconds"] for row in found]
    planned = asked["cells"][0]["config"]
    assert found[0]["planned_step_seconds"] == str(planned["estimated_step_seconds"])
    # A row of another way to measure does not stand for this one.
    ways = run_cells(asked["cells"][1:], rows, use_cpu=False, steps=1, timeout=1, announce=pytest.fail)
    if refusal(asked["cells"][1], use_cpu=False) is not None:
        assert [Status.REFUSED] == [row.status for row in ways]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "another"}, "is no benchmark of the form"),
        ({"cells": 1}, "'cells' is no list"),
        ({"cells": [{}]}, "cell 0 has no name"),
        ({"cells": [{"name": "x"}]}, "'x' has neither a 'config' nor a 'reason'"),
        ({"cells": [{"name": "x", "reason": "y"}] * 2}, "two cells are called 'x'"),
        ({"cells": [{"name": "x", "config": {"gpu_count": 0}}]}, "'x': gpu_count is 0"),
        ({"cells": [{"name": "x", "config": {"gpu_count": True}}]}, "'x': gpu_count is True"),
    ],
)
def test_a_file_of_another_form_is_refused(asked, tmp_path, change, message):
    with pytest.raises(PlanError, match="FG998") as bad:
        read_benchmark(written(tmp_path, {**asked, **change}))
    assert message in bad.value.message


def test_wrong_words_and_damaged_results_are_refused(asked, tmp_path, capsys):
    file = written(tmp_path, asked)
    for words, message in (
        (["stop", file], "has no meaning"),
        (["run", file, "--steps", "0"], "--steps is 0"),
        (["run", str(tmp_path / "none.json")], "cannot be read"),
    ):
        assert main(["benchmark", *words]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "gpt.results.json").write_text('{"format": "another"}')
    assert main(["benchmark", "run", file]) == 1
    assert "move the file away" in capsys.readouterr().err


def test_a_command_that_hangs_or_is_killed_has_a_reason(tmp_path):
    output = str(tmp_path / "output")
    assert "ended after 0.2 s" in _ended([sys.executable, "-c", "import time; time.sleep(99)"], output, 0.2)
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert "it was ended by SIGKILL, as the system does when memory runs out" == _ended(
        [sys.executable, "-c", kill], output, 60
    )


@pytest.mark.matrix
def test_cells_are_measured_and_an_interrupted_benchmark_goes_on(asked, tmp_path):
    bad, good, last = (json.loads(json.dumps(asked["cells"][0])) for _ in range(3))
    bad["name"], bad["config"]["sequence_length"] = "too long", 2048
    last["name"] = "last"
    file = written(tmp_path, {**asked, "cells": [bad, good, last]})
    words = [sys.executable, "-m", "forgather", "benchmark", "run", file, "--steps", "1"]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for line in child.stderr:
        if "3 of 3" in line:
            break
    time.sleep(1)
    child.send_signal(signal.SIGINT)
    assert "2 of 3 cells; the same command goes on with the others" in child.communicate(timeout=patience(60))[1]
    assert 130 == child.returncode
    rows = json.loads((tmp_path / "gpt.results.json").read_text())["rows"]
    assert ["failed", "measured"] == [row["status"] for row in rows]
    assert "IndexError" in rows[0]["reason"]
    assert rows[1]["measured"]["peak_gb"] == pytest.approx(rows[1]["planned"]["peak_gb"], rel=0.15)
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    again = json.loads(done.stdout)["rows"]
    assert rows[1] == again[1]
    assert "measured" == again[2]["status"]
