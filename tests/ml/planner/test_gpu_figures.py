"""Plans for a GPU are close to what `scripts/bench/gpu.py` measured on one; docs/planner_on_gpus.md has all cells."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.matrix import thinned

ROOT = Path(__file__).parents[3]
FIGURES = json.loads(Path(__file__).with_name("gpu_figures.json").read_text())
(MEASURED,) = (cells for kind, cells in FIGURES.items() if kind.startswith("measured on "))
QUICK = ("T5 small, fp32",)


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("gpu_bench", ROOT / "scripts/bench/gpu.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", thinned(sorted(MEASURED), lambda name: name in QUICK))
def test_a_plan_for_a_gpu_is_close_to_the_measurement(name, bench):
    (cell,) = (one for one in bench.CELLS if one.name == name)
    error = bench.planned(cell)["peak_bytes"] / MEASURED[name]["peak_bytes"] - 1
    assert ("compiled" in name) == (not -0.02 <= error <= 0.03), f"{error:+.2%}"


def test_the_page_has_the_figures(bench):
    written = bench.PAGE.read_text()
    assert bench.table(FIGURES) in written
