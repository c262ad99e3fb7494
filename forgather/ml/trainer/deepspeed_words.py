"""What a DeepSpeed config says about a run, as training arguments and as factories of an optimizer and a schedule.

The input is training arguments as the user wrote them, with the setting `deepspeed`; the output is training arguments
that do not contradict it. A value that only the config has is taken from there; a value that both have is compared by
the strategy. If DeepSpeed is not installed and `strict` is false, FSDP2 takes its place.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim import Optimizer

from forgather.errors import TrainingError
from forgather.ml.log import get_logger
from forgather.ml.strategy.deepspeed_arguments import implied_settings, optimizer_section, readable_settings
from forgather.ml.strategy.deepspeed_config import offloads, written_settings
from forgather.ml.strategy.deepspeed_settings import AUTO, ZERO
from forgather.ml.trainer.deepspeed_schedules import SCHEDULES, DeepSpeedSchedule

_log = get_logger(__name__)

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
    for path, name, value in implied_settings(given):
        settings[name] = value
        _log.warning("deepspeed: %s was taken as %s: %s", path, name, json.dumps(value))
    return settings


def optimizer_factory(asked: Any) -> Callable[..., Optimizer] | None:
    """Returns the factory of the optimizer that a DeepSpeed config describes; None if it describes none.

    As in DeepSpeed, all weights are one group. The learning rate and the weight decay are those of the arguments.

    Args:
        asked: the training argument `deepspeed`.

    Raises:
        TrainingError: FG744 if the optimizer is not one that the trainer can make.
    """
    kind, params = optimizer_section(readable_settings(asked))
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
    section = readable_settings(asked).get("scheduler")
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
