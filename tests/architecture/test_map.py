"""docs/architecture.md names modules that exist."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sources import ROOT, sources  # noqa: E402


def test_every_module_of_the_map_exists():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    known = [f"/{source.path}" for source in sources()] + ["/tests/architecture/layers.py"]
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert len(named) > 40
    assert [] == [name for name in named if not any(path.endswith(f"/{name}") for path in known)]


def test_the_map_is_read_in_one_sitting():
    assert len((ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()) <= 150
