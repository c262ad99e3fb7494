"""Golden files: text that a test compares, rewritten when FORGATHER_UPDATE_GOLDEN is set."""

import os
from pathlib import Path


def check_golden(file: Path, text: str) -> None:
    """Compares `text` with the golden `file`; writes it instead where FORGATHER_UPDATE_GOLDEN=1."""
    text = text if text.endswith("\n") else text + "\n"
    if os.environ.get("FORGATHER_UPDATE_GOLDEN") == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert file.is_file(), f"{file} is missing; FORGATHER_UPDATE_GOLDEN=1 writes it"
    assert file.read_text() == text
