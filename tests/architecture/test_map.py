"""The pages about the architecture name modules that exist."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from sources import ROOT, sources  # noqa: E402

PAGES = {
    "architecture.md": 40,
    "architecture_of_finetuning.md": 20,
    "architecture_of_planning.md": 40,
    "architecture_of_choices.md": 7,
    "architecture_of_runs.md": 7,
    "architecture_of_words.md": 1,
    "architecture_of_scale.md": 2,
}
"""The number of modules that each page names at least."""


@pytest.mark.parametrize("page", PAGES)
def test_every_module_of_the_map_exists(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    known = [f"/{source.path}" for source in sources()]
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert len(named) >= PAGES[page]
    files = {name for name in named if (ROOT / name).exists()}
    assert [] == [name for name in named if name not in files and not any(path.endswith(f"/{name}") for path in known)]


@pytest.mark.parametrize("page", PAGES)
def test_the_map_is_read_in_one_sitting(page):
    assert len((ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()) <= 150
