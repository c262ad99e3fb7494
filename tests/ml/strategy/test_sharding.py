"""The words of `fsdp` and `fsdp_config`."""

import logging

import pytest
import torch

from forgather.errors import DistributedError
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.strategy.fsdp_precision import MixedPrecision


@pytest.mark.parametrize(
    ("fsdp", "config", "expected"),
    [
        (True, None, Sharding()),
        ("full_shard", {}, Sharding()),
        (None, {"fsdp_sharding_strategy": "FULL_SHARD"}, Sharding()),
        ("SHARD_GRAD_OP", None, Sharding(strategy="SHARD_GRAD_OP", reshard_after_forward=False)),
        (True, {"reshard_after_forward": False}, Sharding(reshard_after_forward=False)),
        (True, {"reshard_after_forward": 4}, Sharding(reshard_after_forward=4)),
        ("HYBRID_SHARD", {"reshard_after_forward": 4}, Sharding(strategy="HYBRID_SHARD", reshard_after_forward=4)),
        (True, {"wrap_embeddings": False}, Sharding(wrap_embeddings=False)),
        (True, {"shard_size": 2}, Sharding(strategy="HYBRID_SHARD", shard_size=2)),
        (True, {"auto_wrap_policy": "transformer_based"}, Sharding()),
        (True, {"auto_wrap_policy": "LlamaDecoderLayer"}, Sharding(layers=("LlamaDecoderLayer",))),
        (True, {"transformer_layer_cls_to_wrap": "A, B"}, Sharding(layers=("A", "B"))),
        (True, {"transformer_layer_cls_to_wrap": [torch.nn.Linear]}, Sharding(layers=("Linear",))),
        (True, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 9}, Sharding(wrap="size", min_num_params=9)),
        (True, {"min_num_params": 9}, Sharding(wrap="size", min_num_params=9)),
        (True, {"auto_wrap_policy": "NO_WRAP"}, Sharding(wrap="none")),
        (True, {"activation_checkpointing": True}, Sharding(recompute="full")),
        (True, {"activation_checkpointing": "selective"}, Sharding(recompute="selective")),
        (True, {"backward_prefetch": "BACKWARD_PRE", "limit_all_gathers": True}, Sharding()),
        (True, {"forward_prefetch": True, "cpu_offload": True}, Sharding(forward_prefetch=1, cpu_offload=True)),
        (True, {"forward_prefetch": 2, "backward_prefetch": 3}, Sharding(forward_prefetch=2, backward_prefetch=3)),
        (True, {"mixed_precision": "autocast"}, Sharding(precision=MixedPrecision())),
        (
            True,
            {"mixed_precision": "bf16"},
            Sharding(precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
        ),
        (
            True,
            {"mixed_precision": {"param_dtype": "torch.bfloat16", "reduce_dtype": "float32"}},
            Sharding(precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
        ),
    ],
)
def test_words_of_configs_are_understood(fsdp, config, expected, caplog):
    assert expected == Sharding.from_arguments(fsdp, config)
    assert [] == caplog.records


@pytest.mark.parametrize(
    ("fsdp", "config", "words"),
    [
        ("full_shards", None, "fsdp is 'full_shards' (did you mean 'FULL_SHARD'?)"),
        (True, {"cpu_ofload": True}, "fsdp_config has no setting 'cpu_ofload' (did you mean 'cpu_offload'?)"),
        (True, {"cpu_offload": "yes"}, "fsdp_config.cpu_offload is 'yes' (give true or false)"),
        (
            "FULL_SHARD",
            {"sharding_strategy": "NO_SHARD"},
            "fsdp is FULL_SHARD and fsdp_config.sharding_strategy is NO_SH",
        ),
        ("SHARD_GRAD_OP", {"reshard_after_forward": True}, "contradict each other"),
        ("SHARD_GRAD_OP", {"reshard_after_forward": 4}, "contradict each other"),
        (True, {"reshard_after_forward": 1}, "reshard_after_forward is 1 (give true, false, or the number of ranks"),
        (True, {"wrap_embeddings": 1}, "fsdp_config.wrap_embeddings is 1 (give true or false)"),
        ("FULL_SHARD", {"shard_size": 2}, "FULL_SHARD shards the weights over all replicas"),
        (True, {"shard_size": 0}, "fsdp_config.shard_size is 0 (give a whole number of at least 1)"),
        (True, {"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "A"}, "names layers (remove one"),
        (True, {"transformer_layer_cls_to_wrap": 3}, "transformer_layer_cls_to_wrap is 3"),
        (True, {"mixed_precision": "fp16"}, "float16 gradients underflow without loss scaling"),
        (True, {"mixed_precision": {"params": "bf16"}}, "mixed_precision has no setting 'params'"),
        (True, {"mixed_precision": {"param_dtype": "bfloat"}}, "did you mean 'bfloat16'?"),
        (True, {"activation_checkpointing": "some"}, "activation_checkpointing is 'some'"),
        (True, {"backward_prefetch": "BACKWARD"}, "fsdp_config.backward_prefetch is 'BACKWARD' (did you mean"),
        (True, {"cpu_offload": True, "fsdp_cpu_offload": True}, "gives 'cpu_offload' twice"),
    ],
)
def test_what_is_not_known_is_refused(fsdp, config, words):
    with pytest.raises(DistributedError) as caught:
        Sharding.from_arguments(fsdp, config)
    assert caught.value.code == "FG734"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"backward_prefetch": "BACKWARD_POST"}, "FSDP2 always prefetches the next weights"),
        ({"limit_all_gathers": False}, "limit_all_gathers: false has no effect"),
        ({"use_orig_params": True}, "fsdp_config.use_orig_params has no effect"),
        ({"mixed_precision": {"buffer_dtype": "bf16"}}, "buffer_dtype has no effect"),
        ({"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}, "gradients lose precision"),
    ],
)
def test_a_setting_without_effect_is_logged_in_one_line(config, words, caplog):
    with caplog.at_level(logging.WARNING):
        Sharding.from_arguments(True, config)
    assert 1 == len(caplog.records)
    assert words in caplog.text


def test_a_hybrid_shares_within_a_machine_by_default():
    hybrid = Sharding.from_arguments("HYBRID_SHARD", None)
    assert (8, 4, 16, 1) == (
        hybrid.shard_size_among(32, 8),
        hybrid.shard_size_among(4, 8),
        Sharding.from_arguments("FULL_SHARD", None).shard_size_among(16, 8),
        Sharding.from_arguments("NO_SHARD", None).shard_size_among(16, 8),
    )


HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
AUTOCAST = MixedPrecision()


@pytest.mark.parametrize(
    ("given", "dtype", "takes_tokens", "precision", "autocast"),
    [
        (None, torch.bfloat16, True, HALF, None),
        (None, torch.bfloat16, False, AUTOCAST, torch.bfloat16),
        (None, torch.float16, True, AUTOCAST, torch.float16),
        (None, None, True, AUTOCAST, None),
        (AUTOCAST, torch.bfloat16, True, AUTOCAST, torch.bfloat16),
        (HALF, torch.bfloat16, True, HALF, None),
        (HALF, torch.bfloat16, False, HALF, torch.bfloat16),
        (HALF, None, True, HALF, None),
        (HALF, torch.float16, True, HALF, torch.float16),
    ],
)
def test_the_precision_of_a_run_decides_what_is_gathered_and_what_is_autocast(
    given, dtype, takes_tokens, precision, autocast
):
    found = Sharding(precision=given).with_precision_of(dtype, takes_tokens=takes_tokens)
    assert (Sharding(precision=precision), autocast) == found
