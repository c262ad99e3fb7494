"""Golden files: `FORGATHER_UPDATE_GOLDENS=1 pytest` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(file: Path, text: str) -> None:
    """Asserts that `text` is what the file holds."""
    if os.environ.get("FORGATHER_UPDATE_GOLDENS"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text
