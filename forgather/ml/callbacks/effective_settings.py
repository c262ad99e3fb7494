"""Effective settings of a run: the settings of arguments, optimizer and LR schedule that have an effect.

The input is the objects at the start of training; the output is plain data for reports. Settings of the optimizer and
the LR schedule are read from these objects. Training arguments that only configure a default optimizer or schedule are
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPTIMIZER_ARGUMENTS = frozenset(
    "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon optim optim_args optim_target_modules".split()
)
_SCHEDULE_ARGUMENTS = frozenset("lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio".split())
_CHANGING_STATE = frozenset({"base_lrs", "last_epoch", "last_lr", "lr_lambdas"})


def effective_settings(args: Any, optimizer: Any = None, schedule: Any = None) -> dict[str, Any]:
    """Returns the settings of a run that have an effect, under the keys "arguments", "optimizer" and "schedule".

    Args:
        args: the training arguments.
        optimizer: the optimizer, or None if it is not created yet.
        schedule: the LR schedule, or None if it is not created yet.
    """
    found = {"arguments": args.to_dict(), "optimizer": optimizer_facts(optimizer), "schedule": schedule_facts(schedule)}
    # Without an optimizer the arguments decide, so they are kept then.
    idle = set(_OPTIMIZER_ARGUMENTS if found["optimizer"] else ()) | set(
        _SCHEDULE_ARGUMENTS if found["schedule"] else ()
    )
    arguments: Mapping[str, Any] = found["arguments"]
    if "max_steps" in arguments:
        # Only one of the two decides the length of training.
        idle.add("num_train_epochs" if arguments["max_steps"] > 0 else "max_steps")
    for kind in ("logging", "eval", "save"):
        if str(arguments.get(f"{kind}_strategy", "steps")) == "no":
            idle.add(f"{kind}_steps")
    return found | {"arguments": {name: value for name, value in arguments.items() if name not in idle}}


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """Returns the class and the settings of an optimizer; a setting that differs between parameter groups is a list.

    Example:
        >>> import torch
        >>> optimizer_facts(torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9))
        {'class': 'SGD', 'lr': 0.5, 'momentum': 0.9, 'dampening': 0, 'weight_decay': 0}
    """
    if optimizer is None:
        return {}
    optimizer = getattr(optimizer, "optimizer", optimizer)  # out of the wrapper of accelerate
    facts: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for name in group:
            # A schedule overwrites `lr` at each step and keeps the configured value as `initial_lr`.
            known = "initial_lr" if name == "lr" and "initial_lr" in group else name
            shown = _plain(group[known])
            if name != "initial_lr" and _is_informative(shown) and shown not in facts.setdefault(name, []):
                facts[name].append(shown)
    settings = {name: values[0] if len(values) == 1 else values for name, values in facts.items() if values}
    return {"class": type(optimizer).__name__, **settings}


def schedule_facts(schedule: Any) -> dict[str, Any]:
    """Returns the class, the name of the function (as `plan`) and the settings of an LR schedule.

    Example:
        >>> import torch
        >>> from transformers import get_linear_schedule_with_warmup
        >>> schedule_facts(get_linear_schedule_with_warmup(torch.optim.SGD([torch.zeros(1)], lr=1.0), 2, 8))
        {'class': 'LambdaLR', 'plan': 'linear_schedule_with_warmup', 'num_warmup_steps': 2, 'num_training_steps': 8}
    """
    if schedule is None:
        return {}
    schedule = getattr(schedule, "scheduler", schedule)  # out of the wrapper of accelerate
    facts: dict[str, Any] = {"class": type(schedule).__name__}
    plan = next(iter(getattr(schedule, "lr_lambdas", ())), None)
    named = getattr(plan, "func", plan)
    if named is not None:
        name = getattr(named, "__name__", type(named).__name__)
        # transformers names its functions `_get_<schedule>_lr_lambda` and passes the settings with `functools.partial`.
        facts["plan"] = name.removeprefix("_get_").removesuffix("_lr_lambda")
    settings = {**schedule.state_dict(), **(getattr(plan, "keywords", None) or {})}
    for name, value in settings.items():
        # State that changes during training (`last_epoch`, for example) is not a setting.
        if not name.startswith("_") and name not in _CHANGING_STATE and _is_informative(shown := _plain(value)):
            facts[name] = shown
    return facts


def _plain(value: Any) -> Any:
    """Returns a value as a Python number, a string or a list of these, or None if that is not possible."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    return value if isinstance(value, bool | int | float | str) else None


def _is_informative(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, list) and None in value)
