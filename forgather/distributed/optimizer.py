"""ZeRO of a script, and the optimizer that a script has made.

`zero_settings` takes the training arguments of a script that asks for ZeRO, and gives those that this machine can run:
without DeepSpeed, torch's FSDP2 shards the same tensors, unless the script is strict. `optimizer_parts` takes an
optimizer of torch, and gives the text of a config that makes the same one for the weights as the trainer holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from forgather.distributed.script_config import is_plain, yaml_text
from forgather.errors import DistributedError, TrainingError

_ZERO = "zero_optimization"
_OFFLOADS = ("offload_optimizer", "offload_param")
# What changes memory or speed, and no number.
_WITHOUT_NUMBERS = {
    "allgather_bucket_size",
    "reduce_bucket_size",
    "stage3_gather_16bit_weights_on_model_save",
    "overlap_comm",
    "contiguous_gradients",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "sub_group_size",
    "allgather_partitions",
    "reduce_scatter",
    "round_robin_gradients",
}
OPTIMIZER_VARIABLE = "optimizer_factory"


def has_deepspeed() -> bool:
    """Returns whether DeepSpeed is installed. It is not imported."""
    return find_spec("deepspeed") is not None


def zero_settings(
    settings: Mapping[str, Any], *, strict: bool, processes: int, installed: bool
) -> tuple[dict[str, Any], list[str]]:
    """Returns the training arguments for what ZeRO a script asks for, and one line about each difference.

    Stage 0 is plain data parallelism. Without DeepSpeed, stages 1 and 2 become `fsdp: shard_grad_op` and stage 3
    `fsdp: full_shard`: FSDP2 of torch shards the same tensors, or more of them, and gives the same numbers. One process
    has nothing to shard.

    Args:
        settings: the training arguments, with `deepspeed` as the script gives it.
        strict: whether a missing DeepSpeed is an error.
        processes: the number of all processes.
        installed: whether DeepSpeed is installed.

    Raises:
        DistributedError: FG740 if DeepSpeed is missing, and the script is strict or asks for what torch lacks.
    """
    deepspeed = settings.get("deepspeed")
    rest = {name: value for name, value in settings.items() if name != "deepspeed"}
    if not isinstance(deepspeed, Mapping):
        return dict(settings), []
    zero = deepspeed.get(_ZERO)
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", deepspeed.get("zero_stage"))
    if stage == 0 and not isinstance(stage, bool):
        return rest, _refuse_rest(deepspeed, zero, "ZeRO stage 0 is plain data parallelism")
    if installed:
        return dict(settings), []
    if strict or isinstance(stage, bool) or stage not in (1, 2, 3):
        raise DistributedError(
            f"the config asks for ZeRO stage {stage!r}, and deepspeed is not installed",
            code="FG740",
            hint="pip install 'forgather[deepspeed]', or leave out strict: True to train with torch alone",
        )
    notes = _refuse_rest(deepspeed, zero, "deepspeed is not installed")
    if processes == 1:
        how = "one process has nothing to shard"
    else:
        rest["fsdp"] = "full_shard" if stage == 3 else "shard_grad_op"
        how = f"fsdp: {rest['fsdp']} of torch shards in its place"
    return rest, [f"deepspeed is not installed: ZeRO stage {stage} is not used, and {how}", *notes]


def _refuse_rest(deepspeed: Mapping[str, Any], zero: Mapping[str, Any], why: str) -> list[str]:
    """Returns a line for each setting of DeepSpeed that is left out; one that changes numbers is an error."""
    left = {**{name: value for name, value in deepspeed.items() if name not in (_ZERO, "zero_stage")}, **zero}
    notes = []
    for name, value in left.items():
        if name == "stage" or value in (None, False) or value == {}:
            continue
        if name in _OFFLOADS:
            notes.append(f"{why}: {name} is left out, so that the device needs more memory")
        elif name in _WITHOUT_NUMBERS:
            notes.append(f"{why}: {name} has no effect")
        else:
            raise DistributedError(
                f"{name} is {value!r:.80}, and {why}",
                code="FG740",
                hint=f"leave {name} out, or pip install 'forgather[deepspeed]' and use stage 1, 2 or 3",
            ).about(name)
    return notes


def optimizer_parts(optimizer: Any, settings: Mapping[str, Any], model: Any) -> tuple[str, dict[str, Any]]:
    """Returns the text of the block `optimizer` for an optimizer of a script, and the variables that the text reads.

    One group with plain values is written out. Several groups, or values that are no plain data, become a variable: a
    function that makes the groups by the names of the weights.

    Args:
        optimizer: an optimizer of torch over weights of the model, which has not stepped yet.
        settings: the settings that the script gives; a learning rate must be that of the optimizer.
        model: the model.

    Raises:
        TrainingError: FG819 if the optimizer cannot be made again; FG812 if the script gives another learning rate.
    """
    rebuilt = import_module("forgather.ml.rebuilt_optimizer").RebuiltOptimizer(optimizer, model)
    rates = {group["lr"] for group in optimizer.param_groups if "lr" in group}
    for name, values in (("learning_rate", rates), ("weight_decay", None)):
        if name in settings and values is not None and settings[name] not in values:
            raise TrainingError(
                f"learning_rate is {settings[name]}, and the optimizer has {', '.join(map(str, sorted(values)))}",
                code="FG812",
                hint="keep one of them",
            ).about(name)
    keywords = rebuilt.keywords
    if rebuilt.is_one_group and is_plain(keywords):
        lines = [f"    {name}: {yaml_text(value, name)}" for name, value in keywords.items()]
        return "\n".join([f"!partial:{rebuilt.constructor}", *(line.strip() for line in lines)]), {}
    return f"!var {OPTIMIZER_VARIABLE}", {OPTIMIZER_VARIABLE: rebuilt}
