"""Which quantized base models can be trained, and under which strategy.

The input is how the weights of a model are quantized, and the settings of the training arguments. The output is an
error, or None. The check before a run and the trainers both read `ml/quantization.json` through this module.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from forgather.compatibility import combination_facts
from forgather.rule_conditions import holds, names_of
from forgather.stored_model import stored_config

_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "quantization.json")
_SHARDED = ("fsdp2", "fsdp2 with resharding", "hybrid shards")
# 4 bits were compared under DDP and FSDP2, 8 bits in one process: scripts/oracles/library_pairs.py.
_UNDER_COPIES: Mapping[str, str] = {
    "use_liger_kernel": "use_liger_kernel",
    "torch_compile": "torch_compile or torch_compile_backend != None or torch_compile_mode != None or "
    "torch_compile_regions == True",
    "activation_offloading": "activation_offloading",
    "optimizer_in_backward": "optimizer_in_backward",
    "activation_memory_budget": "activation_memory_budget != None",
    "gradient_checkpointing_kwargs": "gradient_checkpointing_kwargs != None and 'offload' in "
    "gradient_checkpointing_kwargs",
    "optim": "optim in ('adamw_torch_8bit', 'adamw_torch_4bit')",
    "bf16_stochastic_round": "bf16_stochastic_round",
}
"""The conditions under which a setting is not compared, by its name."""
_NEVER = ("use_liger_kernel", "bf16_stochastic_round", "optim", "activation_memory_budget")
_FLOATS = ("float32", "float16", "bfloat16")
_CLASSES = {"bitsandbytes": "BitsAndBytesConfig", "torchao": "TorchAoConfig"}


class Quantized(NamedTuple):
    """How the weights of a model are quantized.

    Args:
        method: "bits4" or "bits8" (bitsandbytes), "torchao", or "other".
        storage: the dtype in which bitsandbytes stores weights of 4 bits, such as "uint8".
    """

    method: str
    storage: str = "uint8"


class Refusal(NamedTuple):
    """Why a quantized model cannot be trained: the error code, the message, and what to do instead."""

    code: str
    message: str
    hint: str


def quantized_as(settings: Mapping[str, Any], class_name: str) -> Quantized:
    """Returns how a quantization config of transformers quantizes weights.

    Args:
        settings: its attributes or arguments, by name. `quant_method`, which saved models name, counts more than the
            class.
        class_name: the name of its class.

    Example:
        >>> quantized_as({"load_in_4bit": True, "bnb_4bit_quant_storage": "torch.bfloat16"}, "BitsAndBytesConfig")
        Quantized(method='bits4', storage='bfloat16')
    """
    method = settings.get("quant_method")
    class_name = _CLASSES.get(str(getattr(method, "value", method)), class_name)
    if class_name == "TorchAoConfig":
        return Quantized("torchao")
    if class_name != "BitsAndBytesConfig":
        return Quantized("other")
    if settings.get("load_in_8bit"):
        return Quantized("bits8")
    storage = settings.get("bnb_4bit_quant_storage")
    return Quantized("bits4", "uint8" if storage is None else str(storage).removeprefix("torch."))


def stored_quantization(folder: str) -> Mapping[str, Any] | None:
    """Returns the quantization that the files of a model name; None if the weights in them are not quantized.

    Args:
        folder: the folder of a model in the layout of transformers. A name on the Hub, or a folder whose configuration
            cannot be read, gives None.
    """
    found = (stored_config(folder) or {}).get("quantization_config")
    return found if isinstance(found, dict) else None


def refusal(model: Quantized, settings: Mapping[str, Any], *, has_adapter: bool, processes: int) -> Refusal | None:
    """Returns why a quantized model cannot be trained; None if it can.

    Args:
        model: how its weights are quantized.
        settings: the settings of the training arguments, with the kind of trainer under the name `trainer`.
        has_adapter: whether an adapter is trained on top of it.
        processes: the number of processes of the run.
    """
    known = _methods().get(model.method, {"title": "quantized weights", "refused": {}})
    if not has_adapter:
        return Refusal(
            "FG956",
            f"the model has {known['title']}, which cannot be trained, and there is no adapter",
            "add an adapter: -- include 'adapters/lora.yaml' in [adapter]",
        )
    facts = combination_facts(settings)
    strategy = "fsdp2" if facts["replicas"] in _SHARDED or facts["strategy"] in _SHARDED else facts["strategy"]
    if setting := _not_compared(model, settings, facts, strategy, processes):
        return Refusal(
            "FG955",
            f"{known['title']} with {setting} were not compared with a plain loop under {_title(strategy)}",
            f"remove {setting}",
        )
    if strategy == "ddp" and processes == 1:
        return None
    if model.method == "other":
        return Refusal(
            "FG955",
            f"the model is quantized by a method that was not compared with one process under {_title(strategy)}",
            "train in one process, or quantize with transformers:BitsAndBytesConfig",
        )
    if reason := known["refused"].get(strategy):
        return Refusal(
            "FG955", f"{known['title']} cannot be trained under {_title(strategy)}: {reason}", known["instead"]
        )
    precision = facts["precision"]
    is_cast = strategy == "fsdp2" or str(strategy).startswith("zero")
    if is_cast and model.storage in _FLOATS and precision in ("bfloat16", "float16") and model.storage != precision:
        return Refusal(
            "FG955",
            f"bnb_4bit_quant_storage is {model.storage}, and {_title(strategy)} casts such weights to {precision}",
            f"bnb_4bit_quant_storage: {precision}, or leave it out",
        )
    return None


def _not_compared(
    model: Quantized, settings: Mapping[str, Any], facts: Mapping[str, Any], strategy: Any, processes: int
) -> str | None:
    """Returns the name of a setting that was not tried with quantized weights under a strategy."""
    if facts["context"] in ("yes", "ring"):
        return "context_parallel_size"
    is_copied = strategy in ("ddp", "fsdp2") and facts["replicas"] is None
    is_compared = is_copied and (model.method == "bits4" or (model.method == "bits8" and processes == 1))
    refused = _NEVER if is_compared else _UNDER_COPIES
    # Settings that the user did not give may be missing where a config is checked.
    known = {name: None for condition in _UNDER_COPIES.values() for name in names_of(condition)} | dict(settings)
    return next((name for name in refused if holds(_UNDER_COPIES[name], known) is True), None)


def _title(strategy: Any) -> str:
    return {"fsdp2": "FSDP2", "ddp": "DDP", "pipeline": "a pipeline", "zero": "ZeRO"}.get(
        strategy, str(strategy).replace("zero", "ZeRO ")
    )


@functools.cache
def _methods() -> dict[str, Any]:
    with open(_FILE, encoding="utf-8") as stream:
        methods: dict[str, Any] = json.load(stream)
    return methods
