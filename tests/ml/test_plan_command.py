"""`fgcli plan --hardware` and the note of an out-of-memory error, on configs that are built."""

import json

import pytest

from forgather.cli.main import main
from tests.project.workbench import TINY_TRAINING, make_project

OUT_OF_MEMORY = """\
import torch

class Trainer:
    class args:
        output_dir = "out"

    def train(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    rows = "".join(json.dumps({"text": f"row {number} of many"}) + "\n" for number in range(64))
    files = {
        "toy.py": OUT_OF_MEMORY,
        "rows.jsonl": rows,
        "templates/configs/tiny.yaml": f"{TINY_TRAINING}    save_strategy: steps\n    save_steps: 2\n",
    }
    files["templates/configs/large.yaml"] = "main: !singleton:toy.py:Trainer\n"
    folder = make_project(tmp_path / "bench", files)
    (folder / "box.json").write_text('{"title": "our box", "memory_mib": 1}')
    monkeypatch.chdir(folder)
    return folder


def test_a_plan_says_whether_the_run_fits(bench, capsys):
    assert 0 == main(["-t", "tiny", "plan", "--hardware", "box.json", "--json"])
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["fit"]["ranks"]
    assert (2**20, "does not fit") == (rank["memory_bytes"], rank["verdict"])
    assert rank["peak_bytes"] == max(phase["num_bytes"] for phase in found["ranks"][0]["phases"])
    assert 2 == found["settings"]["per_device_train_batch_size"]
    # AdamW in 32 bits: two values for each weight.
    assert 4 * found["parameters"] == found["model_bytes"] == found["weights_bytes"]
    assert 8 * found["parameters"] == found["optimizer_bytes"]
    assert found["weights_bytes"] + found["optimizer_bytes"] == found["disk"][0]["least"]


def test_unknown_hardware_is_refused_before_anything_is_built(bench, capsys):
    for command in ("plan", "train"):
        assert 1 == main(["-t", "large", command, "--hardware", "h200s"])
        assert "error[FG994]" in capsys.readouterr().err


def test_an_out_of_memory_error_says_how_to_go_on(bench, capsys):
    assert 1 == main(["-t", "large", "train", "--no-check"])
    told = capsys.readouterr().err
    assert "CUDA out of memory" in told
    assert "`fgcli plan` shows" in told


@pytest.mark.matrix
def test_a_run_is_compared_with_the_hardware_that_is_named(bench, capsys):
    assert 0 == main(["-t", "tiny", "train", "--hardware", "box.json"])
    told = capsys.readouterr().err
    assert "plan: does not fit" in told
    (file,) = bench.glob("out/runs/*/plan.json")
    plan = json.loads(file.read_text())
    assert "does not fit" == plan["fit"]["ranks"][0]["verdict"]
    # What the plan says of a checkpoint is what is written, but for the headers of the files.
    for name, planned in (("model", plan["weights_bytes"]), ("optimizer", plan["optimizer_bytes"])):
        (file,) = bench.glob(f"out/checkpoint-*/{name}.safetensors")
        assert planned == len(file.read_bytes()) - 8 - int.from_bytes(file.read_bytes()[:8], "little")


@pytest.mark.matrix
def test_the_comparison_can_be_turned_off(bench, capsys):
    assert 0 == main(["-t", "tiny", "train", "--hardware", "box.json", "--no-plan"])
    assert "plan:" not in capsys.readouterr().err
    assert [] == list(bench.glob("out/runs/*/plan.json"))
