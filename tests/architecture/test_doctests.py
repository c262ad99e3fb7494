"""Every example in a docstring runs."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sources import sources  # noqa: E402


def test_every_example_of_a_docstring_gives_what_it_shows():
    pytest.importorskip("torch")
    failed, tried = {}, 0
    for source in sources():
        if ">>> " not in source.text:
            continue
        found = doctest.testmod(importlib.import_module(source.name), report=False)
        tried += found.attempted
        if found.failed:
            failed[source.path] = found.failed
    assert {} == failed
    assert tried > 100
