"""Settings without effect: whose they are decides whether anything is said."""

import pytest

from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

PARENT = "-- extends 'trainers/trainer.yaml'\n"
ARGS = "[trainer_args]\n    == super()\n"


@pytest.fixture
def told(tmp_path):
    def told(child, parent="", **options):
        files = {
            "templates/project.yaml": PARENT + parent,
            "templates/configs/a.yaml": "-- extends 'project.yaml'\n" + child,
        }
        found = check_project(Project("a.yaml", str(make_project(tmp_path / "bench", files)), **options)).findings
        return [(one.span.file.rpartition("/")[2], one.span.line) for one in found if one.code == "FG457"]

    return told


@pytest.mark.parametrize(
    "line",
    [
        "weight_decay: 0.3",
        "optim: sgd",
        "adam_beta2: 0.99",
        "eval_steps: 5",
        "save_steps: 5",
    ],
)
def test_a_setting_of_the_config_that_the_library_takes_the_effect_of_is_reported(told, line):
    assert [("a.yaml", 4)] == told(ARGS + f"    {line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "weight_decay: 0.1",
        "eval_steps: 5\n    eval_strategy: steps",
        "learning_rate: 3e-3",
        "lr_scheduler_type: cosine",
    ],
)
def test_one_that_has_its_effect_or_asks_for_what_holds_is_not(told, line):
    assert [] == told(ARGS + f"    {line}\n")


def test_what_the_project_says_for_all_its_configs_is_a_default_for_one_that_decides_otherwise(told):
    own = ARGS + "    save_strategy: steps\n    save_steps: 5\n    weight_decay: 0.3\n    lr_scheduler_type: linear\n"
    own += "[optimizer]\n    -- include 'optimizers/adamw.yaml'\n    weight_decay: 0.3\n"
    child = ARGS + '    save_strategy: "no"\n[optimizer]\n    == super()\n    weight_decay: 0.2\n'
    schedule = "[lr_scheduler]\n    -- include 'lr_schedulers/cosine.yaml'\n    num_warmup_steps: 3\n"
    assert [] == told(child + schedule, parent=own)


def test_a_config_that_says_both_is_reported(told):
    schedule = "[lr_scheduler]\n    -- include 'lr_schedulers/cosine.yaml'\n    num_warmup_steps: 3\n"
    child = ARGS + "    lr_scheduler_type: linear\n    warmup_steps: 9\n" + schedule
    assert [("a.yaml", 4), ("a.yaml", 5)] == told(child)


def test_a_short_try_by_an_option_is_not_a_contradiction_to_the_warm_up(told):
    assert [] == told(ARGS + "    warmup_steps: 9\n", max_steps=3)
    assert [("a.yaml", 4)] == told(ARGS + "    warmup_steps: 9\n    max_steps: 3\n")
