"""The options of Lightning's strategies as settings of our trainers.

The input is the name of a strategy class and the options that differ from Lightning's defaults, as plain values; the
output is our settings, the process group's, and the options that mean nothing here or are refused. The reason of each
refusal is that of the record of kind "inner" (`forgather.aliases`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forgather.aliases import alias_of, suggest
from forgather.lightning.durations import seconds_of
from forgather.lightning.option_rules import wrong_options
from forgather.lightning.strategies import STRATEGIES
from forgather.rules import Violation
from forgather.value_text import are_equal, shown


@dataclass(slots=True)
class StrategyMeaning:
    """What the options of a strategy mean.

    Args:
        strategy: "ddp", "fsdp" or "deepspeed".
        settings: our settings by name.
        group: `backend` and `timeout_seconds` of the process group, if they are given.
        notes: one line for each option that has no effect here, with the reason.
        violations: one error for each option that is refused.
    """

    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)


def meaning_of_strategy(name: str, options: Mapping[str, Any]) -> StrategyMeaning:
    """Returns what a strategy object means.

    Args:
        name: the name of the class, as "FSDPStrategy".
        options: the options that differ from Lightning's defaults.

    Example:
        >>> meaning_of_strategy("DDPStrategy", {"static_graph": True}).settings
        {'ddp_static_graph': True}
    """
    if name == "SingleDeviceStrategy":
        return StrategyMeaning("single")
    found = StrategyMeaning(name.removesuffix("Strategy").lower())
    known = STRATEGIES[name].__dataclass_fields__
    rest = dict(options)
    for option in list(rest):
        if option not in known and alias_of("inner", f"{name}.{option}") is None:
            hint = suggest("keyword", option, list(known))
            found.violations.append(
                Violation("FG810", f"{name} has no option {shown(option)}", f"strategy.{option}", hint)
            )
            del rest[option]
    for option, expected in wrong_options(name, rest):
        message = f"{name}({option}={shown(rest.pop(option))})"
        found.violations.append(Violation("FG813", message, f"strategy.{option}", f"expected {expected}"))
    _read_group(found, rest)
    _READERS[name](found, rest)
    for option, value in rest.items():
        _answer(found, name, option, value)
    return found


def _answer(found: StrategyMeaning, name: str, option: str, value: Any) -> None:
    """Answers an option by its record: as a setting of ours, as one without effect, or as one that is refused."""
    alias = alias_of("inner", f"{name}.{option}")
    if alias is not None and alias.verdict == "same":
        found.settings[alias.name] = value
    elif alias is not None and alias.verdict == "elsewhere":
        found.notes.append(f"{name}({option}={shown(value)}) has no effect of its own: {alias.why}")
    else:
        _refuse(found, name, option, value)


def _refuse(found: StrategyMeaning, name: str, option: str, value: Any, hint: str = "") -> None:
    alias = alias_of("inner", f"{name}.{option}")
    hint = hint or (alias.why if alias is not None else "")
    message = f"{name}({option}={shown(value)}) is not available"
    found.violations.append(Violation("FG811", message, f"strategy.{option}", hint or None, found=value))


def _read_group(found: StrategyMeaning, options: dict[str, Any]) -> None:
    backend, timeout = options.pop("process_group_backend", None), options.pop("timeout", None)
    if backend is not None:
        found.group["backend"] = backend
    if timeout is not None:
        # Lightning takes a timedelta; a config writes seconds.
        seconds = timeout if isinstance(timeout, int | float) else seconds_of(timeout)
        if seconds is None:
            _refuse(found, "DDPStrategy", "timeout", timeout, "expected a timedelta, or a number of seconds")
        found.group["timeout_seconds"] = seconds


def _read_ddp(found: StrategyMeaning, options: dict[str, Any]) -> None:
    """DDP's options are settings under other names, which the records list."""


# FSDP


def _read_fsdp(found: StrategyMeaning, options: dict[str, Any]) -> None:
    sharding = options.pop("sharding_strategy", "FULL_SHARD")
    sharding = getattr(sharding, "name", sharding)
    sharding = sharding.upper() if isinstance(sharding, str) else shown(sharding)
    config: dict[str, Any] = {}
    if sharding not in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"):
        _refuse(found, "FSDPStrategy", "sharding_strategy", sharding)
    found.settings["fsdp"] = sharding.lower()
    offload = options.pop("cpu_offload", None)
    if offload is not None and not isinstance(offload, bool) and not hasattr(offload, "offload_params"):
        _refuse(found, "FSDPStrategy", "cpu_offload", offload, "expected true or false")
    elif getattr(offload, "offload_params", offload):
        config["cpu_offload"] = True
    mesh = options.pop("device_mesh", None)
    if (
        isinstance(mesh, tuple | list)
        and len(mesh) == 2
        and all(type(size) is int for size in mesh)
        and sharding == "HYBRID_SHARD"
    ):
        config["shard_size"] = int(mesh[1])
    elif mesh is not None:
        _refuse(found, "FSDPStrategy", "device_mesh", mesh)
    _read_types(found, options.pop("mixed_precision", None), config)
    policy = options.pop("auto_wrap_policy", None)
    layers = _read_units(found, policy, config)
    for name in ("activation_checkpointing", "activation_checkpointing_policy"):
        _read_recomputed(found, name, options.pop(name, None), layers, config)
    for name in ("backward_prefetch", "forward_prefetch", "limit_all_gathers"):
        if name in options:
            value = options.pop(name)
            config[name] = getattr(value, "name", value)
    if config:
        found.settings["fsdp_config"] = config


def _read_types(found: StrategyMeaning, types: Any, config: dict[str, Any]) -> None:
    if types is None:
        return
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    given = {name: types.get(name) if isinstance(types, Mapping) else getattr(types, name, None) for name in names}
    written = {name: str(value).removeprefix("torch.") for name, value in given.items() if value is not None}
    if isinstance(types, Mapping) and set(types) - set(names):
        _refuse(found, "FSDPStrategy", "mixed_precision", types)
    elif written:
        config["mixed_precision"] = written


def _read_units(found: StrategyMeaning, policy: Any, config: dict[str, Any]) -> list[str] | None:
    """Reads what is sharded as one unit; returns the names of the layer classes, None if none are named."""
    if policy is None:
        return None
    keywords = getattr(policy, "keywords", {})
    function = getattr(getattr(policy, "func", policy), "__name__", "")
    if (layers := layer_names(policy)) is None and function == "transformer_auto_wrap_policy":
        layers = layer_names(keywords.get("transformer_layer_cls"))
    if layers is not None:
        config |= {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": layers}
    elif isinstance(policy, Mapping) and set(policy) == {"min_num_params"}:
        config |= {"auto_wrap_policy": "SIZE_BASED_WRAP", **policy}
    elif function == "size_based_auto_wrap_policy" and set(keywords) <= {"min_num_params"}:
        # torch's own default.
        size = keywords.get("min_num_params", 100_000_000)
        config |= {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": int(size)}
    else:
        _refuse(found, "FSDPStrategy", "auto_wrap_policy", policy)
    return layers


def layer_names(policy: Any) -> list[str] | None:
    """Returns the sorted names of the layer classes in a policy; None if the policy is not a set of classes.

    Args:
        policy: a class, a collection of classes or of their names, or torch's `ModuleWrapPolicy`.
    """
    inner = getattr(policy, "_module_classes", policy)
    if isinstance(inner, str | type):
        inner = [inner]
    if not isinstance(inner, set | frozenset | list | tuple):
        return None
    names = [one if isinstance(one, str) else one.__name__ for one in inner if isinstance(one, str | type)]
    return sorted(names) if names and len(names) == len(inner) else None


def _read_recomputed(
    found: StrategyMeaning, option: str, policy: Any, units: list[str] | None, config: dict[str, Any]
) -> None:
    if policy is None:
        return
    layers = layer_names(policy)
    # What is recomputed here is a unit of sharding: other layers would need more memory than the user asked for.
    if layers is None or (units is not None and layers != units):
        _refuse(found, "FSDPStrategy", option, policy)
        return
    config["activation_checkpointing"] = True
    if units is None:
        config |= {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": layers}
        found.notes.append(
            f"{', '.join(layers)} are also the units of sharding, because no auto_wrap_policy names others"
        )


# DeepSpeed

_ZERO = (
    "stage",
    "contiguous_gradients",
    "overlap_comm",
    "allgather_partitions",
    "reduce_scatter",
    "allgather_bucket_size",
    "reduce_bucket_size",
    "sub_group_size",
)
_RECOMPUTING = (
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "synchronize_checkpoint_boundary",
)
_AIO = ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count")
_SCALING = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
# The key of DeepSpeed's config for each option, by section.
_OPTIMIZER = {
    "device": "offload_optimizer_device",
    "nvme_path": "nvme_path",
    "buffer_count": "optimizer_buffer_count",
    "pin_memory": "pin_memory",
}
_WEIGHTS = {
    "device": "offload_params_device",
    "nvme_path": "nvme_path",
    "buffer_count": "params_buffer_count",
    "buffer_size": "params_buffer_size",
    "max_in_cpu": "max_in_cpu",
    "pin_memory": "pin_memory",
}


def _read_deepspeed(found: StrategyMeaning, options: dict[str, Any]) -> None:
    given = options.pop("config", None)
    ours = {*_ZERO, *_RECOMPUTING, *_AIO, *_OPTIMIZER.values(), *_WEIGHTS.values()}
    ours |= {"zero_optimization", "offload_optimizer", "offload_parameters", "zero_allow_untested_optimizer"}
    if given is not None:
        if double := sorted(ours & set(options)):
            message = f"DeepSpeedStrategy has a config, in which Lightning would ignore {', '.join(double)}"
            found.violations.append(Violation("FG812", message, "strategy.config", "write them into the config"))
        found.settings["deepspeed"] = dict(given) if isinstance(given, Mapping) else os.fspath(given)
    else:
        found.settings["deepspeed"] = deepspeed_config(options)
    for name in ours & set(options):
        del options[name]
    scaling = {name: options.pop(name) for name in _SCALING if name in options}
    if scaling and isinstance(found.settings["deepspeed"], dict):
        found.settings["deepspeed"]["fp16"] = scaling
    elif scaling:
        name, value = next(iter(scaling.items()))
        _refuse(found, "DeepSpeedStrategy", name, value, "write it into the section fp16 of the config")
    rows = options.pop("logging_batch_size_per_gpu", "auto")
    if not are_equal(rows, "auto"):
        _refuse(found, "DeepSpeedStrategy", "logging_batch_size_per_gpu", rows)


def deepspeed_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the DeepSpeed config that Lightning makes from the options of a `DeepSpeedStrategy`.

    The sections `aio` and `activation_checkpointing` are left out where they only have DeepSpeed's defaults.

    Args:
        options: the options that differ from Lightning's defaults.

    Source:
        `DeepSpeedStrategy._create_default_config` of Lightning 2.6.
    """
    fields = STRATEGIES["DeepSpeedStrategy"].__dataclass_fields__
    every = {name: options.get(name, field.default) for name, field in fields.items()}
    config: dict[str, Any] = {}
    zero: dict[str, Any] = {name: every[name] for name in _ZERO} if every["zero_optimization"] else {"stage": 0}
    if every["zero_optimization"]:
        config["zero_allow_untested_optimizer"] = every["zero_allow_untested_optimizer"]
        if every["offload_optimizer"]:
            zero["offload_optimizer"] = _section(every, _OPTIMIZER, every["offload_optimizer_device"])
        if every["offload_parameters"]:
            zero["offload_param"] = _section(every, _WEIGHTS, every["offload_params_device"])
    config["zero_optimization"] = zero
    if any(every[name] for name in _RECOMPUTING):
        config["activation_checkpointing"] = {name: every[name] for name in _RECOMPUTING}
    if set(_AIO) & set(options):
        config["aio"] = {name: every[name] for name in _AIO}
    return config


def _section(every: Mapping[str, Any], names: Mapping[str, str], device: str) -> dict[str, Any]:
    left_out: Iterable[str] = () if device == "nvme" else ("nvme_path",)
    return {key: every[option] for key, option in names.items() if key not in left_out}


_READERS: Mapping[str, Callable[[StrategyMeaning, dict[str, Any]], None]]
_READERS = {"DDPStrategy": _read_ddp, "FSDPStrategy": _read_fsdp, "DeepSpeedStrategy": _read_deepspeed}
