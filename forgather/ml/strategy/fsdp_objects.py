"""Torch's objects in `fsdp_config`, as the words of a config.

The input is the training argument as a script gives it, with dtypes, enumerations and settings of FSDP among its
values; the output has texts, flags and mappings, which the rules, records and checkpoints of a run know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy


def without_objects(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `fsdp_config` with torch's objects as the words of a config: dtypes, enumerations and settings of FSDP.

    Args:
        config: the training argument, with values such as `ShardingStrategy.FULL_SHARD`, `torch.bfloat16`,
            `MixedPrecision(param_dtype=torch.bfloat16)` or `CPUOffload(offload_params=True)`.
    """
    return {key: _in_words(value) for key, value in config.items()}


def _in_words(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, CPUOffload | CPUOffloadPolicy):
        return getattr(value, "offload_params", True)
    if is_dataclass(value) and not isinstance(value, type):
        # What has its default is left out: FSDP2 lacks settings that FSDP1 has.
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        defaults = {field.name: field.default for field in fields(value)}
        return {name: _in_words(of) for name, of in given.items() if of != defaults[name]}
    return value
