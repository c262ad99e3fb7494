"""What listing runs costs: processor time of the whole command, and the libraries that it does not import."""

import os
import subprocess
import sys

import pytest

from forgather.run_status import Status
from tests.patience import slowness
from tests.project.workbench import ROOT
from tests.runs.corpus import make_run

QUERY = ["--where", "optimizer.lr<5e-3", "--sort", "eval_loss"]
NEVER = ("torch", "numpy", "pandas", "rich", "jinja2", "ruamel", "transformers", "datasets")


def make_runs(top, count, lines):
    kinds = [(Status.FINISHED, {}), (Status.RUNNING, {"pid": 2**30}), (Status.FAILED, {})]
    for number in range(count):
        status, stated = kinds[number % 3]
        out = top / f"out{number // 100}"
        make_run(
            out,
            number,
            lr=[1e-3, 3e-3, 1e-2][number % 3],
            loss=2 + number / count,
            lines=lines,
            status=status,
            **stated,
        )


def cpu_seconds(words, cwd):
    """Runs `fgcli`, and returns its processor time and the number of lines that it printed."""
    before = os.times()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "forgather", *words], cwd=cwd, env=env, capture_output=True, check=True
    )
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, done.stdout.count(b"\n")


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.matrix)])
def test_a_filtered_and_sorted_list_takes_less_than_400_ms_and_again_less_than_200_ms(
    count, tmp_path, monkeypatch, record_property
):
    make_runs(tmp_path / "runs", count, lines=200)
    words = ["runs", str(tmp_path / "runs"), *QUERY]
    # The smallest of some: other work on the machine makes each a little slower.
    found = []
    for number in range(3):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{number}"))
        found.append(cpu_seconds(words, tmp_path))
    first, num_lines = min(found)
    again = min(cpu_seconds(words, tmp_path)[0] for _ in found)
    record_property("num_runs", count)
    record_property("first_cpu_seconds", round(first, 3))
    record_property("again_cpu_seconds", round(again, 3))
    assert 2 * count / 3 <= num_lines
    assert first <= 0.4 * slowness()
    assert again <= 0.2 * slowness()


def test_a_list_imports_no_large_library(tmp_path):
    make_runs(tmp_path / "runs", 3, lines=20)
    code = (
        "import sys; from forgather.cli.main import main; main(['runs', sys.argv[1], '--where', 'dataset.seed=42'])\n"
        f"print([name for name in {NEVER!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("3 runs: 1 failed, 1 killed, 1 finished\n[]\n"), done.stdout + done.stderr
