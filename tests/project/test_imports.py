"""Imports of a project's own files: what surely fails is told at its line, whatever is guarded is left alone."""

import pytest

from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project


@pytest.fixture
def told(tmp_path):
    def told(source, **others):
        files = {f"{name}.py": text for name, text in {"own": source + "\ndef make(): ...\n", **others}.items()}
        folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": "main: !call:own.py:make\n", **files})
        found = check_project(Project("a.yaml", str(folder))).findings
        return [(one.code, one.span.file.rpartition("/")[2], one.span.line, one.hint) for one in found]

    return told


def test_a_module_that_does_not_exist_is_reported_at_its_line(told):
    assert [("FG320", "own.py", 3, "did you mean 'json'?")] == told('"""Text.\n"""\nimport jsn\n')
    assert [("FG320", "own.py", 1, "did you mean 'json.decoder'?")] == told("from json.decodr import JSONDecoder\n")


def test_a_file_next_to_it_is_imported_with_a_dot(told):
    ((_, _, _, hint),) = told("from own_blocks import a\n", own_blocks="a = 1\n")
    assert "from .own_blocks import" in hint


@pytest.mark.parametrize(
    "source",
    [
        "import json, os.path\n",
        "from .blocks import a\n",
        "try:\n    import jsn\nexcept ImportError:\n    jsn = None\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jsn\n",
        '"""\nimport jsn\n"""\n',
        "import sys\nsys.path.insert(0, '/x')\nimport jsn\n",
        "def f():\n    import jsn\n",
    ],
)
def test_what_exists_or_is_guarded_is_not(told, source):
    assert [] == told(source, blocks="a = 1\n")
