"""The benchmark command reads its arguments: no part means all, an unknown one is refused."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "scripts" / "bench" / "run.py"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("bench_run", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = {"what": "a", "value": 1, "reach": 2, "unit": "ms", "reached": True}
    for part in module.PARTS:
        (tmp_path / f"{part}.py").write_text(f"print({json.dumps([dict(row, what=part)])!r})")
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def test_no_part_means_all_and_the_figures_are_kept_as_json(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "-o", str(tmp_path / "figures.json")])
    assert 0 == bench.main()
    assert list(bench.PARTS) == [row["part"] for row in json.loads((tmp_path / "figures.json").read_text())]
    assert "| cold | 1 | 2 | ms | reached |" in capsys.readouterr().out


def test_an_unknown_part_is_refused(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "cold", "warn"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "no such part: warn" in capsys.readouterr().err


def test_a_part_that_fails_makes_the_command_fail(bench, monkeypatch, tmp_path):
    (tmp_path / "cold.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(sys, "argv", ["run.py", "cold"])
    assert 1 == bench.main()
