"""Settings that stand at the root of a config are told where they belong; targets that are read, or built, are not."""

import pytest

from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import ROOT, make_project

HEAD = "-- extends 'trainers/trainer.yaml'\n[config_metadata]\n    -- set ns.config_name = 'mine'\n"


def told(folder, text):
    make_project(folder, {"templates/configs/a.yaml": text})
    found = check_project(Project("a", folder)).findings
    return [(one.span.line, one.hint) for one in found if one.code == "FG250"]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("learning_rate: 3e-4", "put it into the block [trainer_args], indented as the settings there are"),
        ("max_steps: 10", "put it into the block [trainer_args], indented as the settings there are"),
        ("output_dir: out", "put it into the block [trainer_args], indented as the settings there are"),
        ("batch_size: 3", "per_device_train_batch_size"),
        ("optimiser: adam", "did you mean 'optimizer'?"),
    ],
)
def test_a_setting_at_the_root_is_reported_with_its_place(tmp_path, line, hint):
    ((number, said),) = told(tmp_path, f"{HEAD}{line}\n")

    assert (4, True) == (number, hint in said)


@pytest.mark.parametrize(
    "text",
    [
        HEAD,
        HEAD + "learning_rate: &lr 3e-4\n[trainer_args]\n    == super()\n    learning_rate: *lr\n",
        HEAD + "seed: 7\n[trainer_args]\n    == super()\n    seed: !calc seed + 1\n",
        HEAD + ".learning_rate: 3e-4\n",
        HEAD + "number_of_friends: 3\n",
        HEAD + "learning_rate: ~\noptimiser: ~\n",
        "learning_rate: 3e-4\nmain: !call:dict {lr: 1}\n",
        "learning_rate: 3e-4\n",
    ],
)
def test_what_is_read_or_is_a_target_of_the_user_is_not_a_finding(tmp_path, text):
    assert [] == told(tmp_path, text)


def no_run(folder, text, **options):
    make_project(folder, {"templates/configs/a.yaml": text})
    found = check_project(Project("a", folder), **options).findings
    return [(one.span.line, str(one.severity), f"{one.message}: {one.hint}") for one in found if one.code == "FG251"]


FLAT = """\
# of another tool
model_name_or_path: gpt2
learning_rate: 3e-4
trainer:
  max_epochs: 3
optimizer:
  _target_: torch.optim.AdamW
evaluation_strategy: steps
"""


@pytest.mark.parametrize("for_run", [False, True])
def test_a_config_of_another_tool_is_reported_key_by_key_with_what_to_write(tmp_path, for_run):
    head, *words = no_run(tmp_path, FLAT, for_run=for_run)

    assert (2, "error" if for_run else "warning") == head[:2]
    named = [
        "'model_name_or_path'",
        "'learning_rate'",
        "'trainer'",
        "'optimizer'",
        "`-- extends 'trainers/trainer.yaml'`",
    ]
    assert [] == [word for word in (*named, "(here: learning_rate)", "[trainer_args]") if word not in head[2]]
    wanted = [(2, "models/pretrained.yaml"), (5, "num_train_epochs"), (7, "!singleton:"), (8, "eval_strategy")]
    assert [line for line, _ in wanted] == [line for line, *_ in words]
    assert [] == [word for (_, word), (*_, said) in zip(wanted, words, strict=True) if word not in said]


def test_a_trainer_under_another_name_than_main_is_not_a_run(tmp_path):
    ((line, _, said),) = no_run(tmp_path, "trainer: !singleton:forgather.ml:Trainer\n    model: ~\n")

    assert (1, True) == (line, "name it 'main'" in said)


@pytest.mark.parametrize(
    "text",
    [
        "learning_rate: 3e-4\n",
        "learning_rate: &lr 3e-4\nseed: &seed 3\nmodel: !call:dict {lr: *lr, seed: *seed}\n",
        "learning_rate: 3e-4\nbatch_size: 8\nmain: !call:dict {lr: 1}\n",
        ".learning_rate: 3e-4\n.batch_size: 8\n",
        "width: 3\ndepth: 4\nmodel: !call:dict {width: 3}\n",
    ],
)
def test_a_config_without_main_may_have_targets_of_its_own(tmp_path, text):
    assert [] == no_run(tmp_path, text)


@pytest.mark.parametrize("name", ["tiny_llama"])
def test_the_configs_of_a_project_have_no_such_finding(name):
    folder = ROOT / "projects" / name
    for config in ("tiny",):
        assert [] == [one for one in check_project(Project(config, folder)).findings if one.code == "FG250"]
