"""One choice in the words of other tools: DeepSpeed, Accelerate, and the arguments of transformers' Trainer.

Takes the settings of a choice; gives text, or None if the tool has no words for it: none of them has tensor parallel
layers or rows whose positions are divided, a config of DeepSpeed describes only ZeRO, and transformers shards by FSDP2
among all processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forgather.planner.choices import CHUNKS, POSITIONS
from forgather.planner.zero_settings import completed, unsaid

FORMS: Mapping[str, str] = {
    "deepspeed": "a configuration of DeepSpeed",
    "accelerate": "a configuration of Accelerate",
    "arguments": "arguments of transformers' Trainer",
}


def foreign_text(
    form: str,
    settings: Mapping[str, Any],
    rows: int,
    micro_batches: int,
    *,
    gpus: int,
    nodes: int,
    given: Mapping[str, Any],
) -> str | None:
    """Returns the text of a file, or None if the form cannot express the choice.

    Args:
        form: a key of `FORMS`.
        settings: the settings of the choice, as those of Forgather's trainers.
        rows: the rows of a micro-batch.
        micro_batches: the number of micro-batches of an update.
        gpus: the number of devices of a machine.
        nodes: the number of machines.
        given: the settings `bf16`, `fp16` and `max_grad_norm` of the config.
    """
    if settings.get("tensor_parallel_size", 1) > 1 or settings.get(POSITIONS, 1) > 1 or CHUNKS in settings:
        return None
    if form == "arguments" and settings.get("fsdp") == "hybrid_shard":
        return None
    batch = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    if form == "deepspeed":
        if "deepspeed" not in settings:
            return None
        return json.dumps(_deepspeed(settings, batch, gpus * nodes, given), indent=2) + "\n"
    if form == "accelerate":
        return _yaml(_accelerate(settings, batch, gpus, nodes, given))
    return json.dumps(_arguments(settings, batch, given), indent=2) + "\n"


def missing_settings(form: str, settings: Mapping[str, Any], rows: int, micro_batches: int) -> dict[str, Any]:
    """Returns the settings of a choice for which the files of a form have no words: the code that trains sets them.

    Args:
        form: "config", or a key of `FORMS`.
        settings: the settings of the choice, as those of Forgather's trainers.
        rows: the rows of a micro-batch.
        micro_batches: the number of micro-batches of an update.

    Example:
        >>> missing_settings("deepspeed", {"gradient_checkpointing": True}, 2, 3)
        {'gradient_checkpointing': True}
    """
    recomputes = {"gradient_checkpointing": True} if settings.get("gradient_checkpointing") else {}
    if form == "deepspeed":
        return recomputes
    if form != "accelerate":
        return {}
    if "deepspeed" not in settings:
        number = {"gradient_accumulation_steps": micro_batches}
        return {"per_device_train_batch_size": rows, **number, **({} if settings.get("fsdp") else recomputes)}
    others = {"deepspeed": found} if (found := unsaid(settings["deepspeed"])) else {}
    return {"per_device_train_batch_size": rows, **recomputes, **others}


def _deepspeed(
    settings: Mapping[str, Any], batch: Mapping[str, int], processes: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    rows, number = batch.values()
    usual = {
        "train_batch_size": rows * number * processes,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": number,
        "gradient_clipping": _clipping(given),
        "bf16": {"enabled": bool(given.get("bf16"))},
        "fp16": {"enabled": bool(given.get("fp16"))},
    }
    return completed(settings["deepspeed"], usual)


def _accelerate(
    settings: Mapping[str, Any], batch: Mapping[str, int], gpus: int, nodes: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if gpus * nodes == 1 else "MULTI_GPU",
        "mixed_precision": "bf16" if given.get("bf16") else "fp16" if given.get("fp16") else "no",
        "num_machines": nodes,
        "num_processes": gpus * nodes,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if "deepspeed" in settings:
        found["distributed_type"] = "DEEPSPEED"
        found["deepspeed_config"] = {
            "zero_stage": settings["deepspeed"]["zero_optimization"]["stage"],
            "gradient_accumulation_steps": batch["gradient_accumulation_steps"],
            "gradient_clipping": _clipping(given),
            **{f"{name}_device": part["device"] for name, part in _offloads(settings).items()},
        }
    elif settings.get("fsdp"):
        found["distributed_type"] = "FSDP"
        found["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": settings["fsdp"] != "shard_grad_op",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": bool(settings.get("gradient_checkpointing")),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": _offloads_fsdp(settings),
        }
        if settings["fsdp"] == "hybrid_shard":
            found["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": nodes,
                "parallelism_config_dp_shard_size": gpus,
            }
    return found


def _arguments(settings: Mapping[str, Any], batch: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {**batch, "max_grad_norm": _clipping(given)}
    found |= {name: True for name in ("bf16", "fp16") if given.get(name)}
    recomputes = bool(settings.get("gradient_checkpointing"))
    if "deepspeed" in settings:
        auto = {name: "auto" for name in ("train_batch_size", "train_micro_batch_size_per_gpu")}
        auto["gradient_accumulation_steps"] = "auto"
        return {**found, "gradient_checkpointing": recomputes, "deepspeed": {**auto, **settings["deepspeed"]}}
    if settings.get("fsdp"):
        # transformers recomputes inside of FSDP's units, and refuses `gradient_checkpointing` alongside that.
        reshards = settings["fsdp"] != "shard_grad_op"
        config = {"version": 2, "reshard_after_forward": reshards, "activation_checkpointing": recomputes}
        if _offloads_fsdp(settings):
            config["cpu_offload"] = True
        return {**found, "fsdp": "full_shard auto_wrap", "fsdp_config": config}
    return {**found, "gradient_checkpointing": recomputes}


def _offloads(settings: Mapping[str, Any]) -> dict[str, Any]:
    zero = settings["deepspeed"]["zero_optimization"]
    return {name: part for name, part in zero.items() if name.startswith("offload_")}


def _offloads_fsdp(settings: Mapping[str, Any]) -> bool:
    return bool((settings.get("fsdp_config") or {}).get("cpu_offload"))


def _clipping(given: Mapping[str, Any]) -> float:
    value = given.get("max_grad_norm")
    return float(value) if isinstance(value, int | float) else 1.0


def _yaml(values: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(
                f"{indent}{key}: {value if isinstance(value, str) and value.lower() != 'no' else json.dumps(value)}\n"
            )
    return "".join(lines)
