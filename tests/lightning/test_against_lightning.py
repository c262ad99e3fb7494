"""A module under our trainer comes to what it comes to under Lightning: recorded losses, rates, metrics and hooks."""

import json
from pathlib import Path

import pytest

import forgather.lightning as L
from tests.lightning import scripts
from tests.lightning.comparison import differences, plain

RECORDED = json.loads((Path(__file__).parent / "recorded/lightning_runs.json").read_text(encoding="utf-8"))["runs"]


@pytest.mark.parametrize("case", scripts.CASES, ids=lambda case: case.__name__)
def test_a_script_comes_to_what_it_comes_to_under_lightning(case, tmp_path):
    assert [] == differences(RECORDED[case.__name__], plain(case(L, tmp_path)))


def test_the_comparison_sees_another_run():
    assert len(differences(RECORDED["adamw"], RECORDED["mixed_precision"])) > 20
    assert [".calls[0][1]: 'setup', found 'other'"] == differences(
        {"calls": [["callback", "setup"]]}, {"calls": [["callback", "other"]]}, ""
    )
