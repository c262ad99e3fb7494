"""The settings of DeepSpeed that a choice keeps from a config, as plain values."""

import json

import pytest

from forgather.ml.strategy.deepspeed_settings import SECTIONS
from forgather.planner.choices import choices
from forgather.planner.foreign_configs import foreign_text, missing_settings
from forgather.planner.zero_settings import zero_settings

DECIDED = {
    "deepspeed": {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"},
    "zero_optimization": {"stage"},
    "zero_optimization.offload_optimizer": {"device", "ratio", "nvme_path"},
    "zero_optimization.offload_param": {"device", "nvme_path"},
}
"""What a choice decides, by the section."""


def full_config():
    """Returns a config with all settings that DeepSpeed has, each with a value of its own."""
    found = {}
    for path, keys in SECTIONS.items():
        section = found
        for name in () if path == "deepspeed" else path.split("."):
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section.update(
            {key: f"{path} {key}" for key in keys if f"{path}.{key}".removeprefix("deepspeed.") not in SECTIONS}
        )
    return found


def leaves(config, path=()):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def decided(path):
    return path[-1] in DECIDED.get(".".join(path[:-1]) or "deepspeed", ())


FULL = full_config()


@pytest.mark.parametrize("devices", [1, 4])
def test_each_setting_that_no_choice_decides_is_kept(devices):
    kept = {path: value for path, value in leaves(FULL) if not decided(path)}
    assert len(kept) > 100
    zeros = [one for one in choices(devices, 1, {"deepspeed": FULL}) if "deepspeed" in one.settings]
    assert zeros
    for one in zeros:
        found = dict(leaves(one.settings["deepspeed"]))
        # What is not offloaded has no settings of how it would be.
        offloads = one.settings["deepspeed"]["zero_optimization"].keys() & {"offload_optimizer", "offload_param"}
        wanted = {
            path: value
            for path, value in kept.items()
            if not path[:-1] or not path[-2].startswith("offload_") or path[-2] in offloads
        }
        own = {path: value for path, value in found.items() if not decided(path)}
        assert wanted == own, one.title


def test_a_config_without_settings_has_those_of_the_choice_alone():
    for own in (None, "auto", True, {}, {"zero_optimization": True}, {"zero_optimization": {"stage": 1}}):
        assert {"zero_optimization": {"stage": 3}} == zero_settings(own, 3)
    own = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/x", "pin_memory": True}}}
    offload = {"stage": 3, "offload_param": {"pin_memory": True, "device": "cpu"}}
    assert {"zero_optimization": offload} == zero_settings(own, 3, ["offload_param"])


def test_files_of_other_tools_have_the_settings_or_say_which_they_lack():
    own = {
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto", "check_grad_overflow": True},
        "steps_per_print": 7,
        "zero_optimization": {"reduce_bucket_size": 1000, "allgather_bucket_size": "auto"},
    }
    found = {one.title: one.settings for one in choices(4, 1, {"deepspeed": own})}
    sizes = {"gpus": 4, "nodes": 1, "given": {"bf16": True, "max_grad_norm": 0.5}}
    settings = found["ZeRO 2, optimizer offloaded, recomputed"]
    # DeepSpeed alone does not know "auto".
    written = foreign_text("deepspeed", settings, 2, 3, **sizes)
    assert "auto" not in written
    zero = {"reduce_bucket_size": 1000, "stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "steps_per_print": 7,
        "zero_optimization": zero,
    } == json.loads(written)
    # transformers solves it.
    arguments = json.loads(foreign_text("arguments", settings, 2, 3, **sizes))
    for name in ("gradient_clipping", "bf16", "steps_per_print"):
        assert own[name] == arguments["deepspeed"][name]
    missing = missing_settings("accelerate", settings, 2, 3)
    lacking = {
        "bf16": {"check_grad_overflow": True},
        "steps_per_print": 7,
        "zero_optimization": {"reduce_bucket_size": 1000},
    }
    assert lacking == missing["deepspeed"]
    plain = {one.title: one.settings for one in choices(4, 1, {})}["ZeRO 3, offloaded, recomputed"]
    assert "deepspeed" not in missing_settings("accelerate", plain, 2, 3)
