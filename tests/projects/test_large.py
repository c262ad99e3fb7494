"""The configs of the large models: what the processes of a dry run hold is the whole model, evenly divided."""

import json
import runpy
import shutil
from pathlib import Path

import pytest

from forgather.cli.main import main

PROJECT = Path(__file__).parents[2] / "projects" / "large"
PARAMETERS = {"1b": 1_235_814_400, "8b": 8_030_261_248}
CASES = [
    ("1b", 1024),
    *(("8b", ranks) for ranks in (1, 8, 64, 1024)),
    *((f"8b_{name}", 1024) for name in ("tensor", "pipeline", "long")),
]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.parametrize(("config", "ranks"), CASES)
def test_a_dry_run_says_what_each_process_holds(config, ranks, tmp_path, capsys):
    folder = tmp_path / "large"
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("data", "output_models"))
    runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    capsys.readouterr()
    words = ["-p", str(folder), "-t", config, "train", "--dry-run", "--world-size", str(ranks), "--json"]
    assert 0 == main(words)
    text = capsys.readouterr().out
    found = json.loads(text)
    layout = found.get("layout", found)
    whole = PARAMETERS[config[:2]]
    assert (layout["parameters"], layout["world_size"]) == (whole, ranks)
    holdings = layout["holdings"]
    assert [0, ranks - 1] == [holdings[0]["ranks"][0], holdings[-1]["ranks"][1]]
    held = sum(one["parameters"] * (one["ranks"][1] - one["ranks"][0] + 1) for one in holdings)
    # Slices are rounded up to whole rows of a weight; keys and values of 1B have 512 rows for 1,024 ranks.
    assert whole <= held <= 1.03 * whole
