"""The dtype of forward and backward passes, and the loss scale of float16.

`Precision` provides the autocast context of a forward pass and, for float16, scales the loss. With bfloat16 and full
precision, the loss is not scaled. All ranks agree on whether gradients overflowed, so that either all ranks step or
none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from forgather.errors import TrainingError

_NOTHING_TO_DO = contextlib.nullcontext()
LEAST_SCALE = 2.0**-14
"""The smallest loss scale. If the scale falls below it, gradients overflow although they are scaled down."""


class Precision:
    """The precision of forward and backward passes on one rank.

    Args:
        device: the device that this rank computes on.
        dtype: the dtype of autocast. None to compute in the dtype of the weights.
        scaling: the arguments of `torch.amp.GradScaler`, which is used with float16 only.
        overflow_group: the process group of the ranks that have different gradients of the same update, and therefore
            must agree on whether there was an overflow. None if all ranks have the same gradients.

    Example:
        >>> Precision(torch.device("cpu"), None).scale(torch.ones(()))
        tensor(1.)
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        *,
        scaling: Mapping[str, Any] | None = None,
        overflow_group: Any = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        # bfloat16 has the range of float32, so its losses need no scale.
        self.scaler = torch.amp.GradScaler(device.type, **(scaling or {})) if dtype is torch.float16 else None
        self._overflow_group = overflow_group

    @property
    def scales(self) -> bool:
        """True if losses are scaled, in which case an update may be skipped."""
        return self.scaler is not None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context manager for a forward pass."""
        if self.dtype is None:
            return _NOTHING_TO_DO
        return torch.autocast(self.device.type, dtype=self.dtype)

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuses weights whose gradients cannot be unscaled.

        Raises:
            TrainingError: FG720 if losses are scaled and a trainable weight is in float16.
        """
        if self.scaler is not None and any(p.requires_grad and p.dtype is torch.float16 for p in parameters):
            raise TrainingError(
                "fp16 is on, and the weights are float16 already",
                code="FG720",
                hint="make the model with dtype float32: fp16 computes in float16 and keeps the weights in float32",
            )

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss, multiplied by the loss scale if losses are scaled.

        Shapes:
            loss: a scalar tensor. Returns a scalar tensor.
        """
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> bool:
        """Unscales the gradients, and returns whether they overflowed on any rank.

        If losses are scaled, the call waits for the device. Otherwise it does nothing and returns False.
        """
        if self.scaler is None:
            return False
        self.scaler.unscale_(optimizer)
        # `GradScaler.step` would look at the flags of this rank only, and ranks would step alone.
        found = list(self.scaler._found_inf_per_device(optimizer).values())
        if self._overflow_group is not None:
            for flag in found:
                # Flags of offloaded gradients are on the CPU, where the group of an accelerator cannot reduce.
                there = flag.to(self.device)
                dist.all_reduce(there, op=dist.ReduceOp.MAX, group=self._overflow_group)
                flag.copy_(there)
        return any(bool(flag) for flag in found)

    def update_scale(self) -> None:
        """Updates the loss scale after an optimizer step that was taken, or that was skipped because of an overflow.

        Raises:
            TrainingError: FG721 if the loss scale falls below `LEAST_SCALE` or is not finite.
        """
        if self.scaler is None:
            return
        self.scaler.update()
        scale = self.scaler.get_scale()
        if scale < LEAST_SCALE or not math.isfinite(scale):
            raise TrainingError(
                f"the scale of the float16 loss is {scale:g}, and gradients still overflow: no update is taken",
                code="FG721",
                hint="lower learning_rate or set max_grad_norm; bf16: true has the range of float32 and needs no scale",
            )

    def keep_scale(self) -> None:
        """Keeps the loss scale unchanged, if gradients were dropped for another reason than an overflow."""
        if self.scaler is not None:
            # `update()` would count a step without an overflow and may raise the scale; a given scale is kept.
            self.scaler.update(self.scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, which is empty if losses are not scaled."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint. The state of a run in another precision is ignored."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))
