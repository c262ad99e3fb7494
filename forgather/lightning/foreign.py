"""Objects of Lightning and of `forgather.lightning`, as the name of a class and its options.

The input is an object of a script; the output is a `Given`, or None for an object that is neither. Lightning is not
imported: an object says where its class comes from. An option is given if the object differs in it from an object that
was made without it.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from forgather.lightning.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from forgather.lightning.strategies import STRATEGIES, changed_options
from forgather.lightning.trainer_words import Given
from forgather.value_text import are_equal

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_RECORDS = (*STRATEGIES.values(), ModelCheckpoint, GradientAccumulationScheduler)


def given_of(value: Any) -> Given | None:
    """Returns the class and the options of an object; None if it is neither Lightning's nor `forgather.lightning`'s.

    Args:
        value: a strategy, a callback, a logger or a plugin.

    Example:
        >>> given_of(ModelCheckpoint(save_top_k=3))[:2]
        ('ModelCheckpoint', {'save_top_k': 3})
    """
    if isinstance(value, _RECORDS):
        return Given(type(value).__name__, changed_options(value), value)
    # Not a class that the user has derived: it is a callback of our trainers, which they call as it is.
    if type(value) in (EarlyStopping, LearningRateMonitor, Timer):
        return Given(type(value).__name__, _callback_options(value), value)
    if _is_theirs(type(value)):
        name = type(value).__name__
        return Given(name, _READERS.get(name, _options)(value), value)
    # The user's subclass of a class with a meaning: nothing here knows what it changes.
    if any(_is_theirs(base) and base.__name__ not in _PLAIN for base in type(value).__mro__):
        return Given(type(value).__name__, {}, value)
    return None


_PLAIN = ("Callback", "Logger", "StatefulObject")


def _is_theirs(kind: type[Any]) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def _callback_options(value: EarlyStopping | LearningRateMonitor | Timer) -> dict[str, Any]:
    options = getattr(value, "_options", {})
    parameters = inspect.signature(type(value)).parameters
    return {name: given for name, given in options.items() if not _equal(given, parameters[name].default)}


def _options(value: Any) -> dict[str, Any]:
    """Returns the options in which an object differs from one that was made without them."""
    kind = type(value)
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = {name: one for name, one in inspect.signature(kind).parameters.items() if one.kind not in variadic}
    required = {name for name, one in parameters.items() if one.default is one.empty}
    found = {name: _attribute(value, name) for name in required}
    plain = kind(**found)
    for name in parameters.keys() - required:
        held, default = _attribute(value, name), _attribute(plain, name)
        if held is not default and not _equal(held, default):
            found[name] = held
    return found


def _attribute(value: Any, name: str) -> Any:
    for spelling in (f"_{name}", name):
        if spelling in vars(value):
            return vars(value)[spelling]
    return getattr(value, name, None)


def _equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and are_equal(value, other)


def _read_early_stopping(value: Any) -> dict[str, Any]:
    found = _options(value)
    # Stored with the sign of the mode.
    found["min_delta"] = abs(value.min_delta)
    return {name: given for name, given in found.items() if (name, given) != ("min_delta", 0.0)}


def _read_timer(value: Any) -> dict[str, Any]:
    found = _options(value)
    if "duration" in found:
        found["duration"] = datetime.timedelta(seconds=found["duration"])
    return found


def _read_ddp(value: Any) -> dict[str, Any]:
    return {**_options(value), **value._ddp_kwargs}


def _read_fsdp(value: Any) -> dict[str, Any]:
    found = _options(value)
    for name in ("cpu_offload", "sharding_strategy", "activation_checkpointing", "activation_checkpointing_policy"):
        found.pop(name, None)
    # Their normal forms, into which Lightning has put the options.
    if value.cpu_offload is not None and value.cpu_offload.offload_params:
        found["cpu_offload"] = True
    if value.sharding_strategy.name != "FULL_SHARD":
        found["sharding_strategy"] = value.sharding_strategy.name
    recomputed = value._activation_checkpointing_kwargs
    if recomputed:
        # A list of classes is kept inside of a function that compares with them.
        cells = getattr(recomputed.get("check_fn"), "__closure__", None) or ()
        classes = [cell.cell_contents for cell in cells]
        found["activation_checkpointing_policy"] = recomputed.get("auto_wrap_policy", *classes)
    kwargs = {name: given for name, given in value.kwargs.items() if (name, given) != ("use_orig_params", True)}
    return {**found, **kwargs}


def _read_deepspeed(value: Any) -> dict[str, Any]:
    names = ("remote_device", "load_full_weights", "exclude_frozen_parameters", "process_group_backend", "timeout")
    scaling = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    plain = type(value)()
    found = {
        name: held
        for name in (*names, *scaling)
        if not _equal(held := _attribute(value, name), _attribute(plain, name)) and held is not None
    }
    config = {name: dict(held) if isinstance(held, Mapping) else held for name, held in value.config.items()}
    # Sections that Lightning always writes, with DeepSpeed's own defaults.
    for name in ("aio", "activation_checkpointing"):
        if config.get(name) == plain.config.get(name):
            config.pop(name, None)
    return {**found, "config": config}


_READERS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "EarlyStopping": _read_early_stopping,
    "Timer": _read_timer,
    "DDPStrategy": _read_ddp,
    "FSDPStrategy": _read_fsdp,
    "DeepSpeedStrategy": _read_deepspeed,
}
