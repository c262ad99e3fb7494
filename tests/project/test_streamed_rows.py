"""What streamed rows cannot give is found before a run."""

import pytest

from forgather.errors import Severity
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

CONFIG = """\
-- extends 'trainers/trainer.yaml'
[config_metadata]
    -- set ns.base_model = 'base'
[raw_dataset]
    -- include 'datasets/{kind}.yaml'
    paths: chats.jsonl
    eval_paths: held.jsonl
    streaming: true
[trainer_args]
    == super()
    max_steps: 10
"""


def found(tmp_path, text):
    files = {"templates/configs/a.yaml": text, "chats.jsonl": "{}", "held.jsonl": "{}"}
    findings = check_project(Project("a.yaml", str(make_project(tmp_path / "bench", files)))).findings
    return [one for one in findings if one.code in ("FG805", "FG946", "FG982")]


@pytest.mark.parametrize(
    ("line", "other", "codes"),
    [
        ("max_steps: 10", "max_steps: 10", []),
        ("max_steps: 10", "max_steps: -1", ["FG805"]),
        ("max_steps: 10", "max_steps: 10\n    train_sampling_strategy: group_by_length", ["FG946"]),
        ("max_steps: 10", "max_steps: 10\n    train_sampling_strategy: sequential", ["FG982"]),
        ("eval_paths: held.jsonl", "seed: 1", ["FG982"]),
        ("streaming: true\n", "streaming: false\n", []),
        ("-- set ns.base_model = 'base'", "-- set ns.config_name = 'a'", ["FG982"]),
    ],
)
def test_what_needs_all_rows_or_their_number(tmp_path, line, other, codes):
    seen = found(tmp_path, CONFIG.format(kind="chat").replace(line, other))
    assert codes == [one.code for one in seen]
    assert all(one.severity is Severity.ERROR and one.hint for one in seen)


def test_other_functions_are_seen_in_the_data_of_a_trainer(tmp_path):
    rows = "!call:forgather.ml.data:chats {paths: chats.jsonl, streaming: true}"
    mixed = CONFIG.format(kind="mixture").split("    paths")[0] + f"    datasets: {{a: {rows}}}\n"
    mixed += "[trainer_args]\n    == super()\n    max_steps: 10\n"
    assert ["mix", "split"] == sorted(one.message.split(", and ")[1].split()[0] for one in found(tmp_path, mixed))
    sequential = "max_steps: 10\n    train_sampling_strategy: sequential"
    in_order = CONFIG.format(kind="preferences").replace("max_steps: 10", sequential)
    assert [] == found(tmp_path, in_order.replace("streaming: true", "streaming: true\n    buffer_size: 0"))
