"""The project of preferences: each config trains, from the model that the first one has written."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forgather.launch import plan_run, prepare_run, run
from forgather.project.project import Project

PROJECT = Path(__file__).parents[2] / "projects" / "preferences"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    copy = tmp_path_factory.mktemp("preferences") / "project"
    shutil.copytree(PROJECT, copy, ignore=shutil.ignore_patterns("output_models"))
    trained(copy, "base")
    return copy


def trained(folder, config):
    plan = plan_run(Project(config, folder, max_steps=2))
    run_dir = prepare_run(plan, ["fgcli", "train"])
    assert run(plan, run_dir).status == 0
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("config", "first"), [("dpo", None), ("kto", 0.5), ("orpo", None), ("reward", None)], ids=lambda value: str(value)
)
def test_a_config_trains_from_the_base(folder, config, first):
    records = trained(folder, config)
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) >= 1
    if first is not None:
        assert losses[0] == pytest.approx(first, abs=1e-6)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL uses names that transformers will remove
def test_answers_of_the_base_are_judged_and_the_rewards_are_logged(folder):
    pytest.importorskip("trl")
    records = trained(folder, "grpo")
    assert {"reward", "rewards/contains_answer/mean", "rewards/brevity/mean"} <= set().union(*records)
