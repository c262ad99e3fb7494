"""What the libraries of trackers have of real runs, as `make oracles` recorded it: one run each, whatever happened.

The record is written by `scripts/oracles/trackers.py`, with the versions; none of the libraries is imported here.
"""

import json
from pathlib import Path

import pytest

from forgather.trackers import TRACKERS

RECORD = json.loads((Path(__file__).parent / "recorded/trackers.json").read_text())
LIBRARIES = sorted(name for name in TRACKERS if name in ("aim", "comet_ml", "mlflow", "trackio", "wandb"))
# Offline, these libraries cannot be asked which steps they have, and a killed process takes what Comet has along.
TWICE = {"wandb": {5}}


@pytest.fixture(params=LIBRARIES)
def library(request):
    return request.param


def test_each_library_is_recorded_with_its_version():
    assert LIBRARIES == sorted(RECORD)
    assert all({name, "transformers"} == set(facts["versions"]) for name, facts in RECORD.items())


def test_a_stopped_and_resumed_run_is_one_run_with_each_step_once(library):
    facts = RECORD[library]["resumed"]
    assert (1, True, True) == (facts["runs"], facts["same_id"], facts["same_losses"])
    expected = dict(facts["losses"])
    for name, values in {"loss": expected, "own": {step: step / 2 for step in expected}}.items():
        steps = [step for step, _ in facts[name]]
        assert sorted(expected) == sorted(set(steps))
        assert TWICE.get(library, set()) >= {step for step in steps if steps.count(step) > 1}
        # Also where a step is there twice, its value is the same.
        assert {step: pytest.approx(value) for step, value in values.items()} == dict(facts[name])
        assert all(value == pytest.approx(values[step]) for step, value in facts[name])


def test_settings_and_texts_arrive_and_secrets_do_not(library):
    facts = RECORD[library]
    assert {"config.yaml", "origins.txt", "words", "scores", "dot"} <= set(facts["resumed"]["rest"])
    assert {"AdamW", "one.yaml"} <= set(facts["resumed"]["config"].values())
    assert [] == facts["leaks"]


@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
def test_a_run_of_two_processes_is_one_run_with_the_same_losses(library, strategy):
    facts = RECORD[library][strategy]
    assert (1, True) == (facts["runs"], facts["same_losses"])
    assert [1, 2, 3, 4, 5, 6] == facts["steps"]
