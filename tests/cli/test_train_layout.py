"""`fgcli train --dry-run --world-size N`: who holds what, as a table and as data."""

import json

import pytest

from forgather.cli.main import main
from forgather.launch.dry_run import layout_text

FOUND = {
    "world_size": 8,
    "strategy": "Pipeline",
    "mesh": {"pipeline": 2, "replicate": 4, "shard": 1, "tensor": 1},
    "parameters": 2_500_000,
    "rows_per_update": 32,
    "holdings": [
        {
            "ranks": [0, 3],
            "stages": [0],
            "modules": ["model.embed", "model.layers.0-3"],
            "parameters": 1_500_000,
            "parameter_bytes": 6_000_000,
            "of": 1_500_000,
        },
        {
            "ranks": [4, 7],
            "stages": [1],
            "modules": ["model.layers.4-7", "lm_head"],
            "parameters": 500,
            "parameter_bytes": 2000,
            "of": 1000,
        },
    ],
    "step": {"input_ids": "(2, 16) int64", "output": "(2, 16, 64) float32"},
    "step_problem": None,
    "initial_weights": None,
}


TABLE = """\
processes   8: pipeline 2 x replicate 4  (Pipeline)
model       2.5M parameters
update      32 rows

ranks  stage  parameters  size      holds
0-3    0      1.5M        5.72 MiB  model.embed, model.layers.0-3
4-7    1      500 of 1k   1.95 KiB  model.layers.4-7, lm_head

one micro-batch of one replica, in one process without autocast and with all logits
  input_ids  (2, 16) int64
  output     (2, 16, 64) float32"""


def test_a_layout_is_a_table():
    assert TABLE == layout_text(FOUND)
    assert layout_text({**FOUND, "step_problem": "it looks at values"}).endswith("it looks at values")
    assert "\nweights     set another\n" in layout_text({**FOUND, "initial_weights": "set another"})


@pytest.fixture
def config(tmp_path):
    (tmp_path / "meta.yaml").write_text("")
    folder = tmp_path / "templates" / "configs"
    folder.mkdir(parents=True)
    (folder / "plain.yaml").write_text("main: !partial:builtins:print\n")
    return ["-p", str(tmp_path), "-t", "plain.yaml", "train"]


def test_a_world_size_belongs_to_a_dry_run(config, capsys):
    assert main([*config, "--world-size", "4"]) != 0
    assert "FG462" in capsys.readouterr().err
    assert main([*config, "--dry-run", "--world-size", "0"]) != 0
    assert "--world-size is 0" in capsys.readouterr().err


def test_a_callable_has_no_layout(config, capsys):
    assert main([*config, "--dry-run", "--world-size", "4", "--json"]) != 0
    said = capsys.readouterr()
    assert "FG745" in said.err + said.out
    assert not said.out or json.loads(said.out)
