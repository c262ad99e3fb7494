"""The examples of docs/errors: a config gives the code of its page and its corrected form does not, Python runs."""

import re
from pathlib import Path

import pytest

from forgather.cli.options import OWN_NAMES
from forgather.project.checking import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

PAGES = sorted((Path(__file__).parents[2] / "docs" / "errors").glob("*.md"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
EXAMPLES = [(page.stem, *found.groups()) for page in PAGES for found in FENCE.finditer(page.read_text())]


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, kind, text in EXAMPLES if kind == "yaml"])
def test_a_config_gives_the_code_of_its_page(code, text, checked):
    assert code in checked(code, text)


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, kind, text in EXAMPLES if kind == "yaml fixed"])
def test_a_corrected_config_does_not_give_the_code_of_its_page(code, text, checked):
    assert code not in checked(code, text)


@pytest.fixture
def checked(tmp_path, monkeypatch):
    def check(code, text):
        configs = {"templates/configs/main.yaml": text}
        if code == "FG421":
            configs["templates/configs/copy.yaml"] = text
        folder = make_project(tmp_path / "page", configs)
        monkeypatch.chdir(folder)
        return {found.code for found in check_project(Project("main", folder), reserved=OWN_NAMES).findings}

    return check


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, kind, text in EXAMPLES if kind == "python"])
def test_python_of_a_page_runs(code, text, monkeypatch):
    monkeypatch.chdir(PAGES[0].parents[2])
    exec(compile(text, f"{code}.md", "exec"), {})


def test_there_are_examples_of_both_kinds():
    kinds = [kind for _, kind, _ in EXAMPLES]
    assert 55 <= kinds.count("yaml")
    assert 1 <= kinds.count("python")
