"""The settings of DeepSpeed that a choice takes over from a config, and what other tools are told of them.

Takes the DeepSpeed config of a run under DeepSpeed's current names; gives the config of another ZeRO stage, or of
another tool. Only what a choice decides is replaced: the stage, what is offloaded, and the numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ZERO, STAGE, AUTO = "zero_optimization", "stage", "auto"
_OFFLOADS = ("offload_optimizer", "offload_param")
_OF_OFFLOAD = ("device", "ratio", "nvme_path")
"""What is offloaded, how much of it, and where to."""
_ROWS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def zero_settings(own: Any, stage: int, offloads: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the DeepSpeed config of a choice, with the config's own settings that the choice does not decide.

    Args:
        own: the DeepSpeed config of the run; anything but a mapping has no settings.
        stage: the ZeRO stage.
        offloads: the sections of what is in the memory of the host, of "offload_optimizer" and "offload_param".

    Example:
        >>> zero_settings({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}, 2)
        {'zero_optimization': {'reduce_bucket_size': 1000, 'stage': 2}}
    """
    own = own if isinstance(own, Mapping) else {}
    zero = _section(own, ZERO)
    kept = {key: value for key, value in zero.items() if key not in (STAGE, *_OFFLOADS)}
    moved = {
        name: {**_without(_section(zero, name), _OF_OFFLOAD), "device": "cpu"} for name in _OFFLOADS if name in offloads
    }
    return {**_without(own, (ZERO, *_ROWS)), ZERO: {**kept, STAGE: stage, **moved}}


def completed(config: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a DeepSpeed config for DeepSpeed alone, which does not know the value "auto".

    Args:
        config: the settings of the choice.
        usual: the values of settings that are missing or "auto"; other settings that are "auto" are left out, so that
            they have DeepSpeed's default.

    Example:
        >>> completed({"fp16": {"enabled": "auto", "loss_scale": 128}}, {"fp16": {"enabled": True}})
        {'fp16': {'enabled': True, 'loss_scale': 128}}
    """
    found: dict[str, Any] = {}
    for key in [*usual, *(key for key in config if key not in usual)]:
        value, default = config.get(key, AUTO), usual.get(key)
        if value == AUTO and default is None:
            continue
        if isinstance(value, Mapping):
            found[key] = completed(value, default if isinstance(default, Mapping) else {})
        else:
            found[key] = default if value == AUTO else value
    return found


def unsaid(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of DeepSpeed for which a file of Accelerate has no words.

    Args:
        config: the settings of a choice.
    """
    zero = _section(config, ZERO)
    moved = {name: _without(_section(zero, name), ("device",)) for name in _OFFLOADS}
    sections = {name: _without(_section(config, name), ("enabled",)) for name in ("bf16", "fp16")}
    sections[ZERO] = _said({**_without(zero, (STAGE,)), **moved})
    return _said({**_without(config, ("gradient_clipping",)), **sections})


def _said(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in completed(section, {}).items() if value != {}}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _without(section: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in names}
