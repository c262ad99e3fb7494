"""DeepSpeed's config: what is filled, what is translated, and what is refused with both places."""

import json
import re

import pytest

from forgather.errors import TrainingError
from forgather.ml.strategy.deepspeed_config import zero_config
from forgather.ml.strategy.deepspeed_settings import optimizer_settings, refuse_differences
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments

FILE = """{
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {
      "device": "cpu",
      "pin_memory": true
    },
    "offload_param": {
      "device": "none"
    },
    "overlap_comm": true,
    "contiguous_gradients": true,
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "gather_16bit_weights_on_model_save": true
  },
  "optimizer": {
    "type": "AdamW",
    "params": {
      "lr": 1e-4,
      "betas": [0.9, 0.999],
      "eps": 1e-8,
      "weight_decay": 0.01
    }
  },
  "scheduler": {
    "type": "WarmupDecayLR",
    "params": {
      "total_num_steps": 10000,
      "warmup_min_lr": 0,
      "warmup_max_lr": 1e-4,
      "warmup_num_steps": 500
    }
  },
  "fp16": {
    "enabled": true,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1
  },
  "gradient_clipping": 1.0,
  "train_batch_size": 16,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 4,
  "steps_per_print": 10,
  "wall_clock_breakdown": false
}
"""
"""The file of docs for users of DeepSpeed, with its two mistakes: a schedule of its own, and 16 rows for 4 x 4 x 4."""


def arguments(tmp_path, **given):
    return AccelTrainingArguments(
        tmp_path / "out", per_device_train_batch_size=4, gradient_accumulation_steps=4, **given
    )


def filled(asked, args, *, processes=4, on_cpu=False):
    return zero_config(asked, args, processes=processes, on_cpu=on_cpu)


def without(file, *keys):
    config = json.loads(file)
    for key in keys:
        del config[key]
    return config


def test_auto_is_filled_from_the_arguments(tmp_path):
    config = filled("auto", arguments(tmp_path, bf16=True, max_grad_norm=0.5)).filled_for_model(64)
    assert {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "train_batch_size": 64,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "managed_gradient_accumulation": True,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    } == config.config


def test_the_accumulation_follows_from_the_whole_batch_of_a_mapping(tmp_path):
    asked = {"train_batch_size": 12}
    args = AccelTrainingArguments(tmp_path / "out", per_device_train_batch_size=4, deepspeed=asked)
    assert (4, 3) == (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    assert 12 == filled(asked, args, processes=1).config["train_batch_size"]


def test_every_auto_of_a_file_is_filled(tmp_path):
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    asked = {
        "zero_optimization": {"stage": 3, "overlap_comm": "auto", **dict.fromkeys(sizes, "auto")},
        "bf16": {"enabled": "auto"},
        "fp16": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    config = filled(asked, arguments(tmp_path)).filled_for_model(10)
    assert [100, 90, 100] == [config.config["zero_optimization"][name] for name in sizes]
    assert "overlap_comm" not in config.config["zero_optimization"]
    assert '"auto"' not in json.dumps(config.config)
    assert {"enabled": False} == config.config["fp16"] == config.config["bf16"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"zero_stage": 3}, {"stage": 3}),
        ({"zero_optimization": True}, {"stage": 2}),
        ({"zero_optimization": {"cpu_offload": True}}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        (
            {"zero_optimization": {"stage": 3, "offload_param": True, "offload_optimizer": False}},
            {"stage": 3, "offload_param": {"device": "cpu"}},
        ),
        (
            {"zero_optimization": {"offload_optimizer": "cpu", "cpu_offload_use_pin_memory": True}},
            {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "stage": 2},
        ),
        (
            {"zero_optimization": {"stage": 2}, "allgather_base_size": 5, "reduce_scatter_base_size": 6},
            {"stage": 2, "allgather_bucket_size": 5, "reduce_bucket_size": 6},
        ),
        (
            {"zero_optimization": {"gather_16bit_weights_on_model_save": True}},
            {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True},
        ),
    ],
)
def test_older_spellings_are_translated(tmp_path, asked, expected):
    found = filled(asked, arguments(tmp_path))
    assert expected == found.config["zero_optimization"]


def test_each_translation_is_noted(tmp_path):
    notes = filled(
        {"zero_stage": 2, "zero_optimization": {"cpu_offload": True}}, arguments(tmp_path), on_cpu=True
    ).notes
    assert (
        "zero_stage is read as zero_optimization.stage: 2",
        "cpu_offload is read as offload_optimizer of zero_optimization",
    ) == notes[:2]
    pinned = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    found = filled(pinned, arguments(tmp_path), on_cpu=True)
    assert "pin_memory is set to false" in found.notes[0]
    assert {"device": "cpu", "pin_memory": False} == found.config["zero_optimization"]["offload_optimizer"]
    found = filled({"activation_checkpointing": {"partition_activations": True}}, arguments(tmp_path))
    assert "set gradient_checkpointing" in found.notes[0]


def refused(asked, args, **facts):
    with pytest.raises(TrainingError) as caught:
        filled(asked, args, **facts)
    return caught.value


def test_the_file_for_users_of_deepspeed_is_refused_with_the_fix_of_each_mistake(tmp_path):
    file = tmp_path / "zero2.json"
    file.write_text(FILE)
    error = refused(str(file), arguments(tmp_path, fp16=True, lr_scheduler_type="linear"))
    assert ("FG743", 27) == (error.code, error.span.line)
    assert "scheduler 'WarmupDecayLR' of DeepSpeed conflicts with the trainer's own (lr_scheduler_type: linear)" in (
        error.message
    )
    assert "without lr_scheduler_type, WarmupDecayLR of DeepSpeed is used" in error.hint

    file.write_text(re.sub(r'"scheduler": \{.*?\}\s*\},', "", FILE, flags=re.S))
    error = refused(str(file), arguments(tmp_path, fp16=True))
    assert "FG742" == error.code
    assert error.message == (
        "train_batch_size is 16, and per_device_train_batch_size 4 x gradient_accumulation_steps 4 x 4 processes is 64 "
        "in the training arguments"
    )
    assert "train_batch_size" in file.read_text().splitlines()[error.span.line - 1]

    file.write_text(file.read_text().replace('"train_batch_size": 16', '"train_batch_size": 64'))
    found = filled(str(file), arguments(tmp_path, fp16=True))
    assert 2 == found.stage
    assert {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}.items() <= found.config["fp16"].items()


def test_every_difference_is_reported_with_both_places(tmp_path):
    asked = without(FILE, "scheduler")
    error = refused(asked, arguments(tmp_path, max_grad_norm=0.3), processes=1)
    assert "FG742" == error.code
    assert (
        error.message
        == "gradient_clipping is 1 in the deepspeed mapping, and max_grad_norm is 0.3 in the training arguments"
    )
    assert 'write "auto" for gradient_clipping' in error.hint
    assert ["fp16.enabled is true in the deepspeed mapping, and fp16 is false in the training arguments"] == [
        other.message for other in error.others
    ]


def test_the_optimizer_of_a_file_may_repeat_the_trainers_but_not_differ(tmp_path):
    config = filled(without(FILE, "scheduler", "fp16", "train_batch_size"), arguments(tmp_path))
    same = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
    refuse_differences(config, list(optimizer_settings("AdamW", same)), "the trainer")
    with pytest.raises(
        TrainingError, match=r"optimizer.params.lr is 0.0001 .* and lr of the optimizer is 0.001"
    ) as caught:
        refuse_differences(config, list(optimizer_settings("AdamW", {**same, "lr": 1e-3})), "the trainer")
    assert "FG742" == caught.value.code
    with pytest.raises(TrainingError, match='optimizer.type is "AdamW" .* and the optimizer is "SGD"'):
        refuse_differences(config, list(optimizer_settings("SGD", {"lr": 1e-4})), "the trainer")


@pytest.mark.parametrize(
    ("asked", "said", "hint"),
    [
        ("absent.json", "cannot be read: No such file", "path of a JSON file"),
        ("/dev/zero", "cannot be read: is not a regular file", "path of a JSON file"),
        ("a\0b", "cannot be read: embedded null byte", "path of a JSON file"),
        (7, "deepspeed is 7", '"auto"'),
        ({"fp16": "yes"}, "fp16 is 'yes'", "give a mapping"),
        ({"optimizer": 3}, "optimizer is 3", "give a mapping"),
        ({"gradient_cliping": 1.0}, "no setting 'gradient_cliping'", "did you mean 'gradient_clipping'?"),
        ({"zero_optimization": {"stage": 4}}, "the ZeRO stage is 4", "1 (optimizer state)"),
        ({"zero_optimization": [2]}, r"zero_optimization is \[2\]", "a mapping with a stage"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, asked, said, hint):
    error = None
    try:
        filled(asked, arguments(tmp_path))
    except TrainingError as found:
        error = found
    assert error is not None
    assert "FG741" == error.code
    assert re.search(said, error.message)
    assert hint in error.hint


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ('{"a": 1,\n}', "is not JSON", 2),
        ("[1]", "contains a list", None),
        ("[" * 100_000, "is nested too deeply", 1),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "4300 digits", 1),
        ('{"bf16": {}, "bf16": {"enabled": true}}', "the key 'bf16' is given twice", 1),
        (" " * 2_000_000 + "{}", "is longer than", None),
    ],
)
def test_a_file_without_a_mapping_is_located(tmp_path, text, said, line):
    file = tmp_path / "zero.json"
    file.write_text(text)
    error = refused(str(file), arguments(tmp_path))
    assert "FG741" == error.code
    assert said in error.message
    assert line == (error.span and error.span.line)


@pytest.mark.parametrize(
    ("asked", "said", "hint"),
    [
        ({"zero_optimization": {"stage": 0}}, "ZeRO stage 0", "leave deepspeed out"),
        ({"zero_optimization": False}, "ZeRO stage 0", "leave deepspeed out"),
        ({"zero_optimization": {"stage": 2, "offload_param": True}}, "offload_param at ZeRO stage 2", "stage: 3"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel of DeepSpeed", "tensor_parallel_size"),
        ({"elasticity": {"enabled": True}}, "elasticity of DeepSpeed", "checkpoints fit any number"),
        ({"gradient_allreduce_op": "sum"}, "a gradient_allreduce_op other than mean", "leave it out"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/d"}}},
            "to a disk",
            "device: cpu",
        ),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow", "leave it out"),
    ],
)
def test_a_feature_that_this_trainer_lacks_is_refused_with_an_alternative(tmp_path, asked, said, hint):
    error = refused(asked, arguments(tmp_path))
    assert "FG744" == error.code
    assert said in error.message
    assert hint in error.hint


def test_a_section_that_is_switched_off_asks_for_nothing(tmp_path):
    assert "elasticity" not in filled({"elasticity": {"enabled": False}}, arguments(tmp_path)).config


def test_fp16_on_the_cpu_is_refused(tmp_path):
    assert "bf16: true" in refused({"fp16": {"enabled": True}}, arguments(tmp_path), on_cpu=True).hint
    assert "FG744" == refused("auto", arguments(tmp_path, fp16=True), on_cpu=True).code
