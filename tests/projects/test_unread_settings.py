"""Every block and every `ns.` setting of the library has an effect, is refused, or is reported by name."""

import re

import pytest

from forgather import Project
from forgather.cli.main import main
from forgather.config.traverse import walk
from forgather.project.check import check_project
from tests.matrix import thinned
from tests.project.workbench import ROOT

LIBRARY = ROOT / "templatelib"
TEMPLATES = [
    *(f"trainers/{name}.yaml" for name in ("trainer", "accel_trainer", "pipeline_trainer", "hf_trainer", "grpo")),
    "tasks/text_to_image.yaml",
]
BLOCKS = [
    name
    for name in re.findall(r"^-- block (\w+)", (LIBRARY / "trainers/base.yaml").read_text(), re.MULTILINE)
    # Not values of a config, or what the others are checked against.
    if name not in ("config_metadata", "meta", "dynamic_args", "trainer", "trainer_args", "summary_writer", "sweep")
]
DATA = ["mixture", "tagged", "labelled", "source_target", "images", "chat", "text_files"]
SETTINGS = {"train_file": "x.jsonl", "max_seq_length": 77, "block_size": 77, "train_on": "last"}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "meta.yaml").write_text('name: "P"\ndefault_config: p.yaml\n')
    folder = tmp_path / "templates/configs"
    folder.mkdir(parents=True)

    def make(text):
        (folder / "p.yaml").write_text(text)
        return Project("p.yaml", tmp_path)

    return make


@pytest.mark.parametrize("template", thinned(TEMPLATES, lambda name: name.endswith(("grpo.yaml", "hf_trainer.yaml"))))
def test_a_block_has_an_effect_or_is_reported(template, config):
    values = "".join(f"[{name}]\n    !singleton:own:make_{name}@mine_{name} [{name}]\n\n" for name in BLOCKS)
    given = "".join(f"-- set ns.{name} = 'x'\n" for name in ("instance_prompt",))
    given = given if template.startswith("tasks/") else ""
    project = config(f"-- extends '{template}'\n\n[config_metadata]\n    == super()\n{given}\n{values}")

    graph = project.graph
    used = {getattr(node, "name", None) for _, node in walk([((), graph.targets["main"].value)])}
    reported = {
        found.message.partition("[")[2].partition("]")[0]
        for found in check_project(project).findings
        if found.code == "FG885"
    }

    unused = {name for name in BLOCKS if name in graph.targets and f"mine_{name}" not in used}
    # They are read by another block, which this config replaces as well.
    by_others = {"raw_dataset", "dataset", "model_config", "sample_prompts", "tokenizer"}
    assert unused - by_others <= reported
    assert not reported & {name for name in BLOCKS if f"mine_{name}" in used}
    if template == "trainers/grpo.yaml":
        assert {"data_collator", "preprocess_logits_for_metrics", "distributed_env"} <= reported


def test_a_block_that_is_used_or_empty_is_not_reported(config):
    text = "-- extends 'trainers/%s.yaml'\n[data_collator]\n    %s\n"
    for template, value in (("trainer", "!singleton:own:collator []"), ("grpo", "~")):
        found = check_project(config(text % (template, value))).findings
        assert "FG885" not in {one.code for one in found}, template


@pytest.mark.parametrize("data", thinned(DATA, lambda name: name in ("mixture", "tagged")))
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_other_data_is_refused(name, data, config):
    task = {"tagged": "token_classification", "labelled": "classification", "source_target": "seq2seq"}.get(data)
    task = "image_classification" if data == "images" else task
    parent = f"tasks/{task}.yaml" if task else "trainers/trainer.yaml"
    text = f"-- extends '{parent}'\n[config_metadata]\n    == super()\n%s\n"
    text += f"[raw_dataset]\n    -- include 'datasets/{data}.yaml'\n"
    given = f"-- set ns.{name} = {SETTINGS[name]!r}"

    before, project = config(text % "").rendered.text, config(text % given)
    found = [one for one in check_project(project).findings if one.code == "FG134"]

    is_used = project.rendered.text.split() != before.split()
    assert is_used != bool(found)
    if (data, name) in (("mixture", "train_file"), ("tagged", "train_file"), ("chat", "block_size")):
        assert ["error" if name == "train_file" else "warning"] == [one.severity.value for one in found]
        assert f"'ns.{name}' is set" in found[0].message and "it is a setting of" in found[0].hint


@pytest.mark.parametrize(("other", "is_refused"), [(200, True), (100, False)])
def test_two_maximum_lengths_that_differ_are_refused(other, is_refused, config, tmp_path, capsys):
    lengths = f"-- set ns.max_length = 100\n-- set ns.max_seq_length = {other}\n"
    data = f"[raw_dataset]\n    == super()\n    paths: {tmp_path}/meta.yaml\n"
    config(f"-- extends 'tasks/chat.yaml'\n[config_metadata]\n    == super()\n{lengths}\n{data}")
    main(["-p", str(tmp_path), "check"])
    found = capsys.readouterr()
    assert is_refused == ("100 by ns.max_length and 200 by ns.max_seq_length" in found.out + found.err)
