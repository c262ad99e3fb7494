"""Settings that transformers' `Trainer` does not have: `fgcli check` and the arguments both refuse them by name."""

import dataclasses
import json

import pytest
import transformers

from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.hf import HFTrainer
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments, PipelineTrainingArguments
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.ml.fixtures import rows, tiny_llama
from tests.project.workbench import TINY_TRAINING, make_project

THEIRS = {one.name for one in dataclasses.fields(transformers.TrainingArguments)}
OURS = {
    one.name
    for arguments in (TrainingArguments, AccelTrainingArguments, PipelineTrainingArguments)
    for one in dataclasses.fields(arguments)
} - THEIRS
INSIDE = {"sharding_strategy": "full_shard", "wrap_embeddings": True, "mixed_precision": "autocast", "shard_size": 2}
INSIDE |= {"offload_params": True, "mixed_precision_policy": "bf16"}
CONFIG = """\
-- extends 'project.yaml'

[trainer_args]
    == super()
    gradient_checkpointing: true
    {setting}
"""


def findings(folder, *settings):
    """Returns the messages of a check of a config with these settings."""
    base = TINY_TRAINING.replace("'trainers/trainer.yaml'", "'trainers/hf_trainer.yaml'")
    config = CONFIG.format(setting="\n    ".join(settings))
    make_project(folder, {"templates/project.yaml": base, "templates/configs/a.yaml": config})
    return [f"{one.code} {one.message}" for one in check_project(Project("a.yaml", str(folder))).errors]


def test_the_check_refuses_every_one(tmp_path):
    assert [] == findings(tmp_path / "none", "seed: 3")
    found = findings(tmp_path / "all", *(f"{name}: 1" for name in sorted(OURS)))
    for name in OURS:
        assert any(f"'{name}'" in message for message in found), (name, found)


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_arguments_refuse_it(tmp_path, name):
    with pytest.raises(TypeError, match=f"'{name}'"):
        transformers.TrainingArguments(str(tmp_path), **{name: 1})


@pytest.mark.parametrize("key", INSIDE)
def test_keys_of_our_trainers_in_fsdp_config_are_refused_by_the_check_and_at_the_start(tmp_path, key):
    for number, prefix in enumerate(("", "fsdp_")):
        (found,) = findings(tmp_path / str(number), f"fsdp_config: {{{prefix}{key}: {json.dumps(INSIDE[key])}}}")
        assert found.startswith(f"FG814 fsdp_config has {key}, which transformers.Trainer does not read")
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", fsdp_config={key: INSIDE[key]})
    with pytest.raises(SettingError, match=f"FG814.*fsdp_config has {key}"):
        HFTrainer(tiny_llama(), args, train_dataset=rows(4))


OF_VERSION_1 = {
    "forward_prefetch": (True, False),
    "backward_prefetch": ("backward_pre", "no_prefetch"),
    "limit_all_gathers": (False, True),
    "use_orig_params": (False, True),
    "sync_module_states": (False, True),
}
"""The keys that transformers leaves out for FSDP2, each with a value that would be dropped, and one that asks for nothing."""


@pytest.mark.parametrize("key", OF_VERSION_1)
def test_a_key_that_transformers_would_drop_is_refused_by_the_check_and_at_the_start(tmp_path, key):
    dropped, harmless = OF_VERSION_1[key]
    for number, prefix in enumerate(("", "fsdp_")):
        (found,) = findings(tmp_path / str(number), f"fsdp_config: {{{prefix}{key}: {json.dumps(dropped)}}}")
        assert found.startswith(f"FG814 fsdp_config has {key}, which transformers.Trainer reads for version 1")
    given = {"use_cpu": True, "report_to": "none", "fsdp_config": {key: dropped}}
    with pytest.raises(SettingError, match=f"FG814.*fsdp_config has {key}"):
        HFTrainer(tiny_llama(), transformers.TrainingArguments(str(tmp_path), **given), train_dataset=rows(4))

    assert [] == findings(tmp_path / "harmless", f"fsdp_config: {{{key}: {json.dumps(harmless)}}}")
    assert [] == findings(tmp_path / "old", f"fsdp_config: {{version: 1, {key}: {json.dumps(dropped)}}}")


def test_keys_of_transformers_in_fsdp_config_are_accepted(tmp_path):
    assert [] == findings(tmp_path, "fsdp_config: {reshard_after_forward: true}")
