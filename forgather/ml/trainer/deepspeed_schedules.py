"""The learning rate schedules of DeepSpeed, as schedules of torch.

The input is the type of a schedule and its parameters, as a DeepSpeed config has them; the output is a schedule that
steps once per optimizer step. The rates are those of DeepSpeed, including its first step, which has the lowest rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from forgather.errors import TrainingError, nearest
from forgather.value_text import shown


@dataclass(frozen=True, slots=True)
class _Kind:
    rate: Callable[[int, float, Mapping[str, Any]], float]
    defaults: Mapping[str, Any]


def _share_of_warmup(step: int, params: Mapping[str, Any]) -> float | None:
    """Returns how far the warm-up has come, from 0 to 1; None after it."""
    steps = max(2, params["warmup_num_steps"])
    if step >= steps:
        return None
    return math.log(step + 1) / math.log(steps) if params["warmup_type"] == "log" else step / steps


def _warmup(step: int, base: float, params: Mapping[str, Any]) -> float:
    return _between(step, base, params, after=1.0)


def _warmup_decay(step: int, base: float, params: Mapping[str, Any]) -> float:
    total, warmup = params["total_num_steps"], max(2, params["warmup_num_steps"])
    return _between(step, base, params, after=max(0.0, (total - step) / max(1.0, total - warmup)))


def _between(step: int, base: float, params: Mapping[str, Any], *, after: float) -> float:
    lowest, highest = params["warmup_min_lr"], params["warmup_max_lr"]
    highest = base if highest is None else highest
    if step < 0:
        return float(lowest)
    share = _share_of_warmup(step, params)
    return float(lowest + (highest - lowest) * (after if share is None else share))


def _warmup_cosine(step: int, base: float, params: Mapping[str, Any]) -> float:
    if step < 0:
        return 0.0
    share, lowest = _share_of_warmup(step, params), params["warmup_min_ratio"]
    if share is not None:
        return float(base * (lowest + (1 - lowest) * share))
    warmup, floor = max(2, params["warmup_num_steps"]), params["cos_min_ratio"]
    progress = min(1.0, (step - warmup + 1) / max(1, params["total_num_steps"] - warmup))
    return float(base * max(0.0, floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2))


_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
_RATES = {"warmup_min_lr": 0.0, **_WARMUP}
SCHEDULES = {
    "WarmupLR": _Kind(_warmup, {**_RATES, "warmup_max_lr": None}),
    "WarmupDecayLR": _Kind(_warmup_decay, {**_RATES, "warmup_max_lr": 0.001, "total_num_steps": ...}),
    "WarmupCosineLR": _Kind(
        _warmup_cosine, {**_WARMUP, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, "total_num_steps": ...}
    ),
}
"""The schedules by the type that a DeepSpeed config names, with the defaults of their parameters. `...` is required."""


class DeepSpeedSchedule(LRScheduler):
    """A learning rate schedule with the rates of DeepSpeed.

    Args:
        optimizer: the optimizer.
        kind: the type of the schedule, one of `SCHEDULES`.
        params: the parameters, under DeepSpeed's names.

    Raises:
        TrainingError: FG744 if a parameter is unknown, is missing, or has a value without a meaning.

    Source:
        `deepspeed.runtime.lr_schedules`. DeepSpeed sets the rate of the first step before its schedule counts; the
        rates of step n here are those of its iteration n - 1.
    """

    def __init__(self, optimizer: Optimizer, kind: str, params: Mapping[str, Any]) -> None:
        self.kind = kind
        self.params = {**SCHEDULES[kind].defaults, **params}
        for name, value in self.params.items():
            _check(kind, name, value)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Returns the learning rate of each parameter group, for the next optimizer step."""
        rate = SCHEDULES[self.kind].rate
        return [rate(self.last_epoch - 1, float(base), self.params) for base in self.base_lrs]


def _check(kind: str, name: str, value: Any) -> None:
    defaults = SCHEDULES[kind].defaults
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name not in defaults:
        message, hint = f"{kind} has no parameter {name!r}", nearest(name, list(defaults))
    elif value is ...:
        message, hint = f"{kind} needs {name}", f"write {name} in params of the scheduler"
    elif name == "warmup_type":
        message, hint = f"warmup_type is {shown(value)}", "write log or linear"
        is_number = value in ("log", "linear")
    else:
        message, hint = f"{name} of {kind} is {shown(value)}", "write one number, for all groups of weights"
        is_number |= value is None and defaults[name] is None
    if name not in defaults or not is_number:
        raise TrainingError(message, code="FG744", hint=hint).about("args.deepspeed")
