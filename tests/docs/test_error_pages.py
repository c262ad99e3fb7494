"""The examples of docs/errors: each gives the code of its page where it says so, and its corrected form does not.

What the word after three backticks means: `yaml` is a config whose check gives the code, `yaml fixed` one without errors;
`yaml construct` gives it when `main` is built, and `yaml construct fixed` is built. `python` runs, `python raises` gives
the code. A word with a dot in it is the name of a further file of the page's project, as `yaml templates/project.yaml`.
"""

import re
from pathlib import Path

import pytest

from forgather.cli.options import OWN_NAMES
from forgather.errors import ForgatherError
from forgather.ml import kernels
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

PAGES = sorted((Path(__file__).parents[2] / "docs" / "errors").glob("*.md"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
EXAMPLES = [(page.stem, *found.groups()) for page in PAGES for found in FENCE.finditer(page.read_text())]


@pytest.fixture(autouse=True)
def registered_kernels(monkeypatch):
    """Kernels that a page registers are those of no other test."""
    monkeypatch.setattr(kernels, "_kernels", {})


def is_file(kind):
    return "." in kind


def of_kind(kind):
    found = [(code, text) for code, word, text in EXAMPLES if word == kind]
    return pytest.mark.parametrize(("code", "text"), found, ids=[code for code, _ in found])


@pytest.fixture
def project(tmp_path, monkeypatch):
    def make(code, text):
        files = {word.split()[-1]: more for page, word, more in EXAMPLES if page == code and is_file(word)}
        if code == "FG421":
            files["templates/configs/copy.yaml"] = text
        folder = make_project(tmp_path / "page", {"templates/configs/main.yaml": text, **files})
        monkeypatch.chdir(folder)
        return Project("main", folder, trust=True)

    return make


def checked(project):
    return {found.code: str(found.severity) for found in check_project(project, reserved=OWN_NAMES).findings}


@of_kind("yaml")
def test_a_config_gives_the_code_of_its_page(code, text, project):
    assert code in checked(project(code, text))


@of_kind("yaml fixed")
def test_a_corrected_config_has_no_errors(code, text, project):
    found = checked(project(code, text))
    assert (False, False) == (code in found, "error" in found.values()), found


@of_kind("yaml construct")
def test_building_a_config_gives_the_code_of_its_page(code, text, project):
    with pytest.raises(ForgatherError) as caught:
        project(code, text)()
    assert code == caught.value.code


@of_kind("yaml construct fixed")
def test_a_corrected_config_is_built(code, text, project):
    project(code, text)()


@of_kind("python")
def test_python_of_a_page_runs(code, text, monkeypatch):
    monkeypatch.chdir(PAGES[0].parents[2])
    exec(compile(text, f"{code}.md", "exec"), {})


@of_kind("python raises")
def test_python_of_a_page_gives_its_code(code, text, monkeypatch):
    monkeypatch.chdir(PAGES[0].parents[2])
    with pytest.raises(ForgatherError) as caught:
        exec(compile(text, f"{code}.md", "exec"), {})
    assert code == caught.value.code


RUN = {"yaml", "yaml fixed", "yaml construct", "yaml construct fixed", "python", "python raises"}


def test_every_example_is_of_a_kind_that_is_run():
    assert set() == {kind for _, kind, _ in EXAMPLES if not is_file(kind)} - RUN - {""}
    kinds = [kind for _, kind, _ in EXAMPLES]
    assert MANY <= len([kind for kind in kinds if kind in RUN])
    assert 0 < min(map(kinds.count, RUN))


MANY = 155
"""How many examples are run, at least."""
