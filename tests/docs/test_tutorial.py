"""The tutorial does what it says: its commands, in its order, in an empty folder, print what it shows."""

from pathlib import Path

import pytest

from tests.docs.lessons import follow

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


@pytest.mark.matrix
def test_the_tutorial_is_what_its_reader_sees(tmp_path):
    follow(PAGE.read_text(), tmp_path)
