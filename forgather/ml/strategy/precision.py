"""The dtype of forward and backward passes, and the loss scale of float16.

Takes a device and a dtype; gives the autocast context of a forward pass and, for float16, a scaled loss. With bfloat16
and full precision nothing is scaled. All ranks agree on whether gradients overflowed, so that either all ranks step or
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

LEAST_SCALE = 2.0**-14
"""If the scale falls below this value, gradients overflow although they are scaled down: the run has diverged."""


class Precision:
    """The precision of the passes of one process.

    Args:
        device: on which passes run.
        dtype: of autocast; None for the dtype of the weights.
        scaling: settings of `torch.amp.GradScaler`; used with float16 only.
        overflow_group: ranks that hold different gradients of one update, and therefore must agree on an overflow; None
            if all ranks hold the same gradients.

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
        """True if losses are scaled, so that an update may be skipped."""
        return self.scaler is not None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a forward pass."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuses weights whose gradients cannot be unscaled.

        Raises:
            TrainingError: FG720 for trainable weights in float16.
        """
        if self.scaler is not None and any(p.requires_grad and p.dtype is torch.float16 for p in parameters):
            raise TrainingError(
                "fp16 is on, and the weights are float16 already",
                code="FG720",
                hint="make the model with dtype float32: fp16 computes in float16 and keeps the weights in float32",
            )

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss from which `backward` starts.

        Shapes:
            loss: scalar. Returns a scalar.
        """
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> bool:
        """Unscales the gradients, and returns whether they overflowed, the same on every rank. Waits for the device."""
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
        """Updates the scale after an update that was taken or skipped.

        Raises:
            TrainingError: FG721 if the scale cannot be lowered any further.
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
        """Keeps the scale of before, for gradients that were dropped for another reason than an overflow."""
        if self.scaler is not None:
            # `update()` would count a step without an overflow and may raise the scale; a given scale is kept.
            self.scaler.update(self.scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint; empty if nothing is scaled."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint; that of a run in another precision is ignored."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))
