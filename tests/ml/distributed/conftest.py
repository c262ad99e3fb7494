"""Keeps what the cells measured, and writes it where documentation shows it."""

import dataclasses
import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def measured(request):
    """Returns a function that notes the errors of a cell; `--write-results` keeps them in a file."""
    notes = []

    def note(cell, errors):
        facts = {
            name: getattr(cell, name)
            for name in ("strategy", "world_size", "model", "accumulation", "precision", "option")
        }
        notes.append({**facts, "digits": errors.digits, **dataclasses.asdict(errors)})

    yield note
    if file := request.config.getoption("write_results"):
        file = Path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(notes, indent=1), encoding="utf-8")
