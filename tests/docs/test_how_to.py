"""Each how-to page does what it says, in the project that the tutorial makes, and fits on a screen."""

import shutil
from pathlib import Path

import pytest

from tests.docs.lessons import Command, follow, steps

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "how-to").glob("*.md"))
SCREEN_LINES = 60
SLOW = (
    *(
        "adapters",
        "calibrate",
        "chat",
        "classify",
        "compare",
        "control",
        "doctor",
        "export",
        "long_rows",
        "memory",
        "metrics",
        "model_and_loss",
    ),
    *("monitors", "plan", "resume_and_export", "runs", "streaming", "talk", "trackers", "watch"),
)
"""The pages whose commands take more than two seconds of CPU time."""
PREPARATION = ("fgcli new ", "cd ", "python make_text.py", "rm ")

of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
of_each_page_in_time = pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.matrix] if page.stem in SLOW else []) for page in PAGES],
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The project of the tutorial before its first run, and a copy of it."""
    folder = follow((DOCS / "tutorial.md").read_text(), tmp_path_factory.mktemp("reader"), only=PREPARATION)
    return folder, Path(shutil.copytree(folder, tmp_path_factory.mktemp("kept") / "copy"))


@pytest.fixture
def project(made):
    """The project without what other pages have made in it; in its place, because `fgcli new` trusts that folder."""
    folder, copy = made
    shutil.rmtree(folder)
    return Path(shutil.copytree(copy, folder))


@of_each_page_in_time
def test_a_how_to_is_what_its_reader_sees(page, project):
    follow(page.read_text(), project)


@of_each_page
def test_a_how_to_has_an_example_and_fits_on_a_screen(page):
    text = page.read_text()
    assert any(isinstance(step, Command) for step in steps(text))
    assert len(text.splitlines()) <= SCREEN_LINES
