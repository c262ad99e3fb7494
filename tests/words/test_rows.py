"""What guides on distributed training ask for works, or is answered at its line: 90 rows, and eleven mistakes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from forgather.project.check import check_project
from forgather.project.project import Project
from tests.matrix import thinned
from tests.project.workbench import ROOT, TINY_TRAINING, make_project

ROWS = {str(row["row"]): row for row in YAML(typ="safe").load(Path(__file__).with_name("rows.yaml"))}
CONFIGS = [name for name, row in ROWS.items() if "settings" in row or "blocks" in row]
SCRIPTS = [name for name, row in ROWS.items() if "python" in row]
TESTS = [(name, test) for name, row in ROWS.items() for test in row.get("run_by", ())]
QUICK = {"2", "5", "9", "13", "17", "32", "41", "44", "51", "54", "56", "1.7.3", "1.7.4", "1.7.6", "77"}
"""Rows with several answers, and one of each kind."""


def test_a_test_a_script_or_a_config_proves_each_row(record_property):
    expected = [*map(str, range(1, 91)), *(f"1.7.{number}" for number in range(1, 12))]
    assert expected == list(ROWS)
    record_property("rows", len(ROWS))
    kinds = {"settings", "blocks", "python", "run_by"}
    assert [] == [name for name, row in ROWS.items() if not kinds & set(row)]
    assert [] == [name for name in CONFIGS if "says" not in ROWS[name]]


@pytest.fixture
def project(tmp_path):
    def project(row):
        settings = "".join(f"    {line}\n" for line in row.get("settings", "").splitlines())
        text = TINY_TRAINING.replace("trainer.yaml", f"{row.get('trainer', 'trainer')}.yaml", 1)
        # What a row sets takes the place of what the frame sets.
        keys = {line.partition(":")[0] for line in row.get("settings", "").splitlines()}
        lines = [line for line in text.splitlines() if line.strip().partition(":")[0] not in keys]
        rows = '{"text": "a b c d e f g h"}\n' * 8
        files = {"templates/configs/a.yaml": "\n".join(lines) + "\n" + settings + row.get("blocks", "")}
        return Project("a", str(make_project(tmp_path, {**files, "rows.jsonl": rows})))

    return project


@pytest.mark.parametrize("name", thinned(CONFIGS, lambda name: name in QUICK))
def test_a_config_is_right_or_answered_at_its_line(name, project):
    row = ROWS[name]
    found = [one for one in check_project(project(row), for_run=True).findings if one.severity.name != "LINT"]
    told = []
    for one in found:
        line = Path(one.span.file).read_text(encoding="utf-8").split("\n")[one.span.line - 1].strip()
        told.append((one.code, line, f"{one.message} {one.hint}"))
    open_answers = list(told)
    for code, line, words in row["says"]:
        # A code with a question mark is that of a library which may be installed.
        is_optional = code.endswith("?")
        match = [one for one in open_answers if answers(one, code.rstrip("?"), line, words)]
        assert match or is_optional, (code, line, words, told)
        open_answers = [one for one in open_answers if one not in match[:1]]
    assert [] == open_answers


def answers(one, code, line, words):
    return re.fullmatch(code, one[0]) and one[1].startswith(line) and re.search(words, one[2])


@pytest.mark.parametrize("name", thinned(SCRIPTS, lambda name: name in QUICK))
def test_a_script_runs(name, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    exec(compile(ROWS[name]["python"], f"row {name}", "exec"), {"__name__": f"row_{name}"})


@pytest.mark.parametrize(("name", "test"), TESTS)
def test_a_test_that_runs_a_row_exists(name, test):
    file, _, function = test.partition("::")
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {function or 'test_'}", text, re.MULTILINE), test


@pytest.mark.matrix
def test_pytest_collects_each_test_that_runs_a_row():
    files = sorted({f"tests/{test.partition('::')[0]}" for _, test in TESTS})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-o",
        "addopts=--import-mode=importlib",
        "--full",
        *files,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ}, check=False)
    found = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    missing = [test for _, test in TESTS if not any(one.startswith(f"tests/{test}") for one in found)]
    assert [] == missing, done.stdout[-2000:]
