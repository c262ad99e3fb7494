"""What a DeepSpeed config says about a run, as training arguments and as factories of an optimizer and a schedule.

The input is training arguments as the user wrote them, with the setting `deepspeed`; the output is training arguments
that do not contradict it. A value that only the config has is taken from there; a value that both have is compared by
the strategy. If DeepSpeed is not installed and `strict` is false, FSDP2 takes its place.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim import Optimizer

from forgather.errors import TrainingError
from forgather.ml.log import get_logger
from forgather.ml.strategy.deepspeed_config import offloads, written_settings
from forgather.ml.strategy.deepspeed_settings import ABSENT, AUTO, ZERO, value_of
from forgather.ml.trainer.deepspeed_schedules import SCHEDULES, DeepSpeedSchedule

_log = get_logger(__name__)

# The keys of the config, and the training argument that has the same meaning.
_SHARED = {
    ("train_micro_batch_size_per_gpu",): "per_device_train_batch_size",
    ("gradient_accumulation_steps",): "gradient_accumulation_steps",
    ("gradient_clipping",): "max_grad_norm",
    ("bf16", "enabled"): "bf16",
    ("fp16", "enabled"): "fp16",
}
_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
# Parameters of DeepSpeed's optimizers that choose an implementation, and no numbers.
_IMPLEMENTATION = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction")


def with_deepspeed_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the training arguments, extended by the values that only the DeepSpeed config has.

    Args:
        given: the training arguments as the user wrote them.
    """
    settings = dict(given)
    for path, name, value in _implied(settings):
        if settings.get(name) is None:
            settings[name] = value
            _log.warning("deepspeed: %s was taken as %s: %s", path, name, json.dumps(value))
    return settings


def _implied(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields the key of the DeepSpeed config, the training argument and its value."""
    config = _config_of(settings.get("deepspeed"))
    for keys, name in _SHARED.items():
        value = value_of(config, keys)
        if value not in (ABSENT, AUTO, None) and isinstance(value, int | float):
            yield ".".join(keys), name, value
    both = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total = config.get("train_batch_size")
    # Of the three numbers, the missing one follows; if no one is missing, the strategy compares them.
    if isinstance(total, int) and not isinstance(settings.get("deepspeed"), Mapping) and not all(map(config.get, both)):
        yield "train_batch_size", "global_batch_size", total
    kind, params = _optimizer_section(config)
    if kind is None:
        return
    # The defaults are those of DeepSpeed's own optimizers, or of torch's where these are asked for.
    decays = params.get("torch_adam") and kind == "adamw"
    defaults = {"lr": 1e-3, "weight_decay": 0.01 if decays else 0.0}
    for key, name in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        value = params.get(key, defaults[key])
        if value != AUTO:
            yield f"optimizer.params.{key}", name, value


def _config_of(asked: Any) -> dict[str, Any]:
    """Returns the config under current names; an empty one if it cannot be read, which the strategy reports."""
    if asked is None or asked == AUTO:
        return {}
    try:
        return written_settings(asked)
    except TrainingError:
        return {}


def _optimizer_section(config: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    params = section.get("params") if isinstance(section, Mapping) else None
    return (kind.lower() if isinstance(kind, str) else None), dict(params) if isinstance(params, Mapping) else {}


def optimizer_factory(asked: Any) -> Callable[..., Optimizer] | None:
    """Returns the factory of the optimizer that a DeepSpeed config describes; None if it describes none.

    As in DeepSpeed, all weights are one group. The learning rate and the weight decay are those of the arguments.

    Args:
        asked: the training argument `deepspeed`.

    Raises:
        TrainingError: FG744 if the optimizer is not one that the trainer can make.
    """
    kind, params = _optimizer_section(_config_of(asked))
    if kind is None:
        return None
    if kind not in _OPTIMIZERS or params.get("bias_correction") is False:
        what = f"optimizer {kind!r} of DeepSpeed" if kind not in _OPTIMIZERS else "bias_correction: false"
        raise TrainingError(
            f"{what} is not available under this trainer",
            code="FG744",
            hint="give the trainer an optimizer_factory (the block [optimizer]), or write type: "
            + ", ".join(one.__name__ for one in _OPTIMIZERS.values()),
        ).about("args.deepspeed")
    own: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in params.items()
        if value != AUTO and name not in ("lr", "weight_decay", *_IMPLEMENTATION)
    }
    return functools.partial(_OPTIMIZERS[kind], **own)


def schedule_factory(asked: Any, args: Any) -> Callable[..., DeepSpeedSchedule] | None:
    """Returns the factory of the schedule that a DeepSpeed config describes; None if it describes none.

    Args:
        asked: the training argument `deepspeed`.
        args: the training arguments, which give the values that are "auto".

    Raises:
        TrainingError: FG744 if the schedule is not one that the trainer can make.
    """
    section = _config_of(asked).get("scheduler")
    if not section:
        return None
    kind = section.get("type") if isinstance(section, Mapping) else section
    if kind not in SCHEDULES:
        raise TrainingError(
            f"scheduler {kind!r} of DeepSpeed is not available under this trainer",
            code="FG744",
            hint=f"write one of {', '.join(SCHEDULES)}, or leave it out and set lr_scheduler_type",
        ).about("args.deepspeed")
    return functools.partial(_schedule, kind=kind, params=dict(section.get("params") or {}), args=args)


def _schedule(
    optimizer: Optimizer,
    num_training_steps: int,
    num_warmup_steps: int,
    *,
    kind: str,
    params: dict[str, Any],
    args: Any,
) -> DeepSpeedSchedule:
    # As transformers fills them in.
    auto = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": num_warmup_steps,
        "total_num_steps": num_training_steps,
    }
    filled = {name: auto[name] if value == AUTO and name in auto else value for name, value in params.items()}
    return DeepSpeedSchedule(optimizer, kind, {name: value for name, value in filled.items() if value != AUTO})


def without_deepspeed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the training arguments; with FSDP2 in place of DeepSpeed if that is missing and `strict` is false.

    The losses are those of ZeRO. Stages 1 and 2 become `shard_grad_op`, which also keeps whole weights between forward
    and backward pass, and stage 3 becomes `full_shard`.

    Args:
        given: the training arguments, extended by the values of the DeepSpeed config.
    """
    settings = dict(given)
    asked = settings.get("deepspeed")
    if settings.get("strict", True) or asked is None or is_installed():
        return settings
    config = written_settings(asked)
    stage = config[ZERO]["stage"]
    strategy = "full_shard" if stage == 3 else "shard_grad_op"
    offload = any(offloads(config, what) for what in ("optimizer", "param"))
    settings |= {"deepspeed": None, "fsdp": strategy, "fsdp_config": {"cpu_offload": True} if offload else None}
    _log.warning(
        "deepspeed is not installed, and strict is false: FSDP2 (%s%s) trains in place of ZeRO stage %s, with the same "
        "losses; DeepSpeed's settings about buckets and communication have no effect",
        strategy,
        ", cpu_offload" if offload else "",
        stage,
    )
    return settings


def is_installed() -> bool:
    """Returns whether the package `deepspeed` can be imported; the package is not imported."""
    return find_spec("deepspeed") is not None
