"""The table of guarantees says what the full sets noted, and how to measure it again."""

import importlib.util
import re
from pathlib import Path

from scripts.reports import BEGIN, replaced

ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("write_guarantees", ROOT / "scripts" / "write_guarantees.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_row_joins_what_the_tests_of_a_guarantee_noted():
    script = load_script()
    noted = {"tests/reliability/test_a.py::test_one": "3 of 3", "tests/reliability/test_b.py::test_two": "4 of 4"}
    row = script.table({"R3": noted}).splitlines()[-1]
    assert row.startswith("| R3 | After `kill -9`")
    assert "| 3 of 3; 4 of 4 | `pytest tests/reliability/test_a.py tests/reliability/test_b.py --full` |" in row


def test_what_a_benchmark_noted_is_measured_again_by_it():
    row = load_script().table({"digests": {"scripts/bench/checkpoint_save.py": "1.01"}}).splitlines()[-1]
    assert row.endswith("| 1.01 | `python scripts/bench/checkpoint_save.py` |")


def test_each_guarantee_that_a_test_notes_has_a_row():
    tests = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py"))
    noted = set(re.findall(r'\bfigure\(\s*"(\w+)"', tests))
    assert {"R1", "S6"} < noted
    assert set() == noted - set(load_script().GUARANTEES)


def test_the_page_has_a_place_for_the_table():
    script = load_script()
    page = script.PAGE.read_text(encoding="utf-8")
    changed = replaced(page, "| R1 |")
    assert "| R1 |\n<!-- figures: end -->" in changed
    assert page.split(BEGIN)[0] == changed.split(BEGIN)[0]


def test_the_quick_set_notes_nothing(figure, full, tmp_path, monkeypatch):
    from tests.reliability import conftest

    monkeypatch.setattr(conftest, "FIGURES", tmp_path / "build" / "figures.json")
    figure("R1", "something")
    assert full == (tmp_path / "build" / "figures.json").exists()
