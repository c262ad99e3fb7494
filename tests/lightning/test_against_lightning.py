"""A module under our trainer comes to what it comes to under Lightning: recorded losses, rates, metrics and hooks."""

import json
from pathlib import Path

import pytest

import forgather.lightning as L
from tests.lightning import scripts

RECORDED = json.loads((Path(__file__).parent / "recorded/lightning_runs.json").read_text(encoding="utf-8"))["runs"]
TOLERANCE = 1e-6


def differences(expected, found, place=""):
    """The places in which two values of lists, mappings, numbers and names differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = [*expected, *(name for name in found if name not in expected)]
        return [
            one
            for name in names
            for one in differences(expected.get(name, "nothing"), found.get(name, "nothing"), f"{place}.{name}")
        ]
    if isinstance(expected, list) and isinstance(found, list):
        sizes = [] if len(expected) == len(found) else [f"{place}: {len(expected)} entries, found {len(found)}"]
        pairs = enumerate(zip(expected, found, strict=False))
        return sizes + [one for number, (a, b) in pairs for one in differences(a, b, f"{place}[{number}]")]
    if isinstance(expected, float) and isinstance(found, int | float):
        return (
            []
            if abs(expected - found) <= TOLERANCE * max(1.0, abs(expected))
            else [f"{place}: {expected!r}, found {found!r}"]
        )
    return [] if expected == found else [f"{place}: {expected!r}, found {found!r}"]


def plain(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("case", scripts.CASES, ids=lambda case: case.__name__)
def test_a_script_comes_to_what_it_comes_to_under_lightning(case, tmp_path):
    assert [] == differences(RECORDED[case.__name__], plain(case(L, tmp_path)))
