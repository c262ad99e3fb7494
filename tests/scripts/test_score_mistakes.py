"""The command that scores a tool on the corpus of mistakes: places, codes, and what goes wrong with the tool."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "score_mistakes.py"

# Finds a misspelt key of meta.yaml, under a code and a line of its own.
TOOL = """
import json, sys
from pathlib import Path
file = Path(sys.argv[1], "meta.yaml")
lines = file.read_text().splitlines()
found = [n for n, line in enumerate(lines, 1) if line.startswith("default_confg")]
print(json.dumps([{"file": str(file), "line": n + int(sys.argv[2]), "code": "unknown-key"} for n in found]))
"""


@pytest.fixture
def score(monkeypatch, capsys, tmp_path):
    spec = importlib.util.spec_from_file_location("score_mistakes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    (tmp_path / "tool.py").write_text(TOOL)
    (tmp_path / "codes.json").write_text(json.dumps({"unknown-key": ["FG402", "FG403"]}))

    def run(*options, command=f"{sys.executable} {tmp_path}/tool.py {{project}} 0"):
        codes = ["--codes", str(tmp_path / "codes.json")]
        status = module.main(["--command", command, "--category", "project_file", *codes, *options])
        return status, capsys.readouterr().out

    return run


def row(text, category):
    return next(line.split()[1:] for line in text.splitlines() if line.startswith(category))


def test_the_table_counts_places_and_codes_by_category(score):
    status, table = score()
    assert 0 == status
    assert ["6", "1", "1", "1", "1"] == row(table, "project_file") == row(table, "all")
    assert "meta-search-folder: expected FG404 meta.yaml:5; said nothing" in table


def test_a_wrong_line_is_not_exact(score, tmp_path):
    _, table = score(command=f"{sys.executable} {tmp_path}/tool.py {{project}} 1")
    assert ["6", "1", "0", "1", "0"] == row(table, "project_file")


def test_a_tool_that_does_not_run_finds_nothing(score, tmp_path):
    _, table = score(command=f"{sys.executable} {tmp_path}/missing.py {{project}}")
    assert ["6", "0", "0", "0", "0"] == row(table, "project_file")
    assert "said no findings" in table


def test_the_words_of_the_tool_are_kept_beside_each_mistake(score):
    rows = json.loads(score("--json")[1])
    first = next(found for found in rows if found["id"] == "meta-key")
    assert ["unknown-key meta.yaml:5 "] == first["said"]
    assert "FG402 meta.yaml:5" == first["expected"]
    assert first["exact"]


def test_a_tool_that_calls_what_is_right_a_mistake_fails(score, tmp_path):
    (tmp_path / "strict.py").write_text('print(\'{"findings": [{"file": "meta.yaml", "line": 1, "message": "no"}]}\')')
    status, table = score("--category", "innocent", command=f"{sys.executable} {tmp_path}/strict.py")
    assert 1 == status
    assert "right edits called mistakes: 16 of 16" in table
