"""The precision of FSDP2: the dtypes in which weights are gathered and gradients are summed.

`precision_of` takes the value of `fsdp_config.mixed_precision`. A value that would lose gradients is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from forgather.errors import DistributedError, nearest
from forgather.ml.log import get_logger

_log = get_logger(__name__)

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """The dtypes of computation and gradient reduction under FSDP2. None stands for the dtype of the weights.

    Args:
        param_dtype: the dtype of gathered weights and of the computation.
        reduce_dtype: the dtype in which gradients are summed over ranks.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The same settings as torch's `MixedPrecisionPolicy`."""
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)


BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""The mixed precision of FSDP2 if the training arguments have `bf16: true`."""


def refused_setting(message: str, hint: str | None, name: str = "fsdp_config") -> DistributedError:
    """Returns the error about a setting of FSDP2.

    Args:
        message: what was found.
        hint: what to write instead, or None.
        name: the training argument with the setting.
    """
    return DistributedError(message, code="FG734", hint=hint).about(name)


def precision_of(value: Any) -> MixedPrecision | None:
    """Returns the dtypes that `fsdp_config.mixed_precision` requests, or None if it is not given.

    Args:
        value: the value of the setting.

    Raises:
        DistributedError: FG734 if it is unknown, or if gradients would underflow.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in ("autocast", "no"):
        return MixedPrecision()
    if isinstance(value, str | torch.dtype):
        value = {"param_dtype": value}
    if not isinstance(value, Mapping):
        hint = "give param_dtype, reduce_dtype, or bf16 or autocast alone"
        raise refused_setting(f"fsdp_config.mixed_precision is {value!r}", hint)
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    for name in value:
        if name not in names:
            message = f"fsdp_config.mixed_precision has no setting {str(name)!r}"
            raise refused_setting(message, nearest(str(name), names))
    param = _dtype(value.get("param_dtype"), "param_dtype")
    reduce = _dtype(value.get("reduce_dtype"), "reduce_dtype")
    if _dtype(value.get("buffer_dtype"), "buffer_dtype") is not None:
        _log.warning("mixed_precision.buffer_dtype has no effect: FSDP2 leaves buffers in the type that the model has")
    if reduce == torch.bfloat16:
        _log.warning(
            "mixed_precision.reduce_dtype is bfloat16: gradients lose precision when they are added over ranks; "
            "leave it out to add them in float32"
        )
    if param == torch.bfloat16 and reduce is None:
        # Gradients lose precision if they are added over ranks in bfloat16.
        reduce = torch.float32
    return MixedPrecision(param_dtype=param, reduce_dtype=reduce)


def _dtype(value: Any, name: str) -> torch.dtype | None:
    if value is None:
        return None
    word = str(value).removeprefix("torch.")
    if word in ("fp16", "float16", "half"):
        raise refused_setting(
            f"fsdp_config.mixed_precision.{name} is {value!r}, and float16 gradients underflow without loss scaling",
            "give bfloat16, or set fp16: true in the training arguments instead",
        )
    if word not in _DTYPES:
        message = f"fsdp_config.mixed_precision.{name} is {value!r}"
        raise refused_setting(message, nearest(word, list(_DTYPES)))
    return _DTYPES[word]
