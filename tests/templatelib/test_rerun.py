"""A tiny training, repeated out of its folder, writes the very bytes of its loss file again."""

import importlib.util
import json
from pathlib import Path

import pytest

if not importlib.util.find_spec("torch"):
    pytest.skip("needs torch", allow_module_level=True)

from forgather.cli.main import main
from tests.templatelib.test_training import BASE, TRAINERS


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_training_is_repeated_to_the_same_bytes(tmp_path, monkeypatch, capfd, trainer):
    rows = [{"text": f"row {number} of a text that is long enough to be cut into blocks"} for number in range(12)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "templates" / "configs").mkdir(parents=True)
    (tmp_path / "meta.yaml").write_text("name: again\n")
    settings = "[trainer_args]\n    == super()\n    max_steps: 4\n    logging_steps: 1\n    eval_strategy: steps\n    eval_steps: 2\n"
    text = BASE.replace("[trainer_args]\n    == super()\n    max_steps: 2\n", settings)
    (tmp_path / "templates" / "configs" / "a.yaml").write_text(f"-- set trainer_template = '{trainer}'\n{text}")
    monkeypatch.chdir(tmp_path)

    assert 0 == main(["train"])
    (first,) = Path("out/runs").glob("2*")
    assert 0 == main(["rerun", str(first)])

    (second,) = Path("out/reruns").glob("*/runs/2*")
    losses = (first / "loss.jsonl").read_bytes()
    assert losses == (second / "loss.jsonl").read_bytes()
    assert [1, 2, 3, 4] == [record["step"] for record in map(json.loads, losses.splitlines()) if "loss" in record]
    assert 2 <= sum("eval_loss" in record for record in map(json.loads, losses.splitlines()))
    assert f"loss file   identical bytes, {len(losses.splitlines())} lines" in capfd.readouterr().err
