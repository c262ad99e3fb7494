"""The settings of Lightning's strategies are taken by the trainer that they name."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from forgather.lightning import DDPStrategy, FSDPStrategy
from forgather.lightning.words import read_words
from forgather.ml import AccelTrainingArguments
from forgather.ml.strategy.deepspeed_config import zero_config
from forgather.ml.strategy.fsdp_config import Sharding

STRATEGIES = ["ddp", "ddp_find_unused_parameters_true", "fsdp", "fsdp_cpu_offload", "deepspeed", "deepspeed_stage_1"]
STRATEGIES += ["deepspeed_stage_2_offload", "deepspeed_stage_3", "deepspeed_stage_3_offload"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_settings_of_a_strategy_are_those_of_its_trainer(strategy):
    words = {"strategy": strategy, "devices": 1, "accelerator": "cpu", "max_steps": 3, "precision": "bf16-mixed"}
    found = read_words(**words, gradient_clip_val=0.5, accumulate_grad_batches=2, logger=False)
    args = AccelTrainingArguments(**{**found.settings, "output_dir": "out"})
    assert (True, 0.5, 2, 3) == (args.bf16, args.max_grad_norm, args.gradient_accumulation_steps, args.max_steps)
    assert found.trainer.endswith(":AccelTrainer")
    if args.deepspeed is not None:
        config = zero_config(args.deepspeed, args, processes=1, on_cpu=True)
        assert config.stage == {"1": 1, "3": 3}.get(strategy[16:17], 2)


def test_the_group_of_a_strategy_goes_to_accelerate():
    strategy = DDPStrategy(process_group_backend="gloo", timeout={"seconds": 90}, gradient_as_bucket_view=True)
    found = read_words(strategy=strategy, devices=1, max_epochs=1, accelerator="cpu", logger=False)
    args = AccelTrainingArguments(**{**found.settings, "output_dir": "out"})
    assert (True, "gloo") == (args.ddp_gradient_as_bucket_view, args.accelerator_args["backend"])
    assert 90 == args.accelerator_args["kwargs_handlers"][0].timeout.total_seconds()


BLOCKS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["Linear"]}
TRANSFORMER = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
SHARDED = [
    ({}, None),
    (
        {"auto_wrap_policy": TRANSFORMER, "activation_checkpointing_policy": {nn.Linear}},
        {**BLOCKS, "activation_checkpointing": True},
    ),
    ({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, BLOCKS),
    (
        {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=1000)},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000},
    ),
    (
        {"cpu_offload": CPUOffload(offload_params=True), "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"cpu_offload": True},
    ),
    (
        {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE, "limit_all_gathers": False},
        {"backward_prefetch": "BACKWARD_PRE", "limit_all_gathers": False},
    ),
    (
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
    ),
    ({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2)}, {"shard_size": 2}),
    ({"state_dict_type": "sharded", "use_orig_params": False, "sync_module_states": True}, None),
]


@pytest.mark.parametrize(("options", "config"), SHARDED, ids=lambda one: ",".join(one or "-"))
def test_the_options_of_fsdp_are_those_of_our_sharding(options, config):
    found = read_words(strategy=FSDPStrategy(**options), devices=1, accelerator="cpu", max_epochs=1, logger=False)
    args = AccelTrainingArguments(**{**found.settings, "output_dir": "out"})
    assert ("fsdp", config) == (found.strategy, args.fsdp_config)
    wanted = options.get("sharding_strategy", "FULL_SHARD")
    assert getattr(wanted, "name", wanted) == Sharding.from_arguments(args.fsdp, args.fsdp_config).strategy
