"""`!var pp_config` is the text of the config, wherever the config is built."""

import runpy

import pytest

from forgather.cli.main import main
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

CONFIG = """\
meta:
  output_dir: {{ project_dir }}/out
text: &text !var pp_config
main: !partial:report.py:report
  text: *text
  with_default: !var {name: pp_config, default: none}
"""
CODE = """\
from pathlib import Path
def report(text, with_default, **given):
    with Path(__file__).with_name('told').open('a') as stream:
        stream.write(f'{text == with_default}\\n===\\n{text}\\n===\\n')
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "p", {"templates/configs/a.yaml": CONFIG, "report.py": CODE})
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FORGATHER_TRUST", str(folder))
    return folder


def told(folder):
    return (folder / "told").read_text().split("===\n")[:2]


def test_a_construction_has_the_text(bench):
    project = Project("a", bench)

    assert project.rendered.text == project("text")
    assert "given" == project("text", pp_config="given")
    assert [] == [one for one in check_project(project).findings if one.code == "FG244"]


def test_a_run_and_its_repetition_have_the_text_of_then(bench):
    text = Project("a", bench).rendered.text
    assert 0 == main(["train"])
    assert ["True\n", f"{text}\n"] == told(bench)
    (bench / "told").unlink()
    (bench / "templates/configs/a.yaml").write_text(CONFIG + "more: 1\n")
    (run,) = (bench / "out/runs").glob("2*")

    main(["rerun", str(run)])

    assert ["True\n", f"{text}\n"] == told(bench)


def test_generated_code_has_the_text(bench, tmp_path):
    assert 0 == main(["code", "text", "--verify", "-o", str(tmp_path / "made.py")])

    assert Project("a", bench).rendered.text == runpy.run_path(str(tmp_path / "made.py"))["build"]()
