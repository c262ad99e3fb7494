"""The types that forward and backward passes compute in, and the scale of a float16 loss.

Takes a device and a type; gives the context of a forward pass and, for float16, a scaled loss. Keeps true: bfloat16
and full precision scale nothing; all ranks agree on whether gradients overflowed, so that none steps alone; the
autocast of a pass is torch's own, the same under every strategy.
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
"""Where the scale falls below this, gradients overflow though they are scaled down: the run has diverged."""


class Precision:
    """How one process computes passes.

    Args:
        device: where passes run.
        dtype: of autocast; None for the type of the weights.
        scaling: settings of `torch.amp.GradScaler`; used with float16 alone.
        overflow_group: ranks that hold different gradients of one update, which must agree on an overflow; None where
            all ranks hold the same ones.

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
        self.scaler = torch.amp.GradScaler(device.type, **(scaling or {})) if dtype is torch.float16 else None
        self._overflow_group = overflow_group

    @property
    def scales(self) -> bool:
        """True where losses are scaled, and an update may be left out."""
        return self.scaler is not None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a forward pass."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuses weights whose gradients cannot be scaled back.

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
        """Returns the loss as `backward` should start from it."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> bool:
        """Scales the gradients back; tells whether they overflowed, on every rank alike. Waits for the device."""
        if self.scaler is None:
            return False
        self.scaler.unscale_(optimizer)
        found = list(self.scaler._found_inf_per_device(optimizer).values())
        if self._overflow_group is not None:
            for flag in found:
                there = flag.to(self.device)  # of offloaded gradients: the group cannot reduce where they lie
                dist.all_reduce(there, op=dist.ReduceOp.MAX, group=self._overflow_group)
                flag.copy_(there)
        return any(bool(flag) for flag in found)

    def update_scale(self) -> None:
        """Updates the scale after an update, taken or skipped.

        Raises:
            TrainingError: FG721 where the scale cannot fall any further.
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
        """Keeps the scale as it was before gradients that no update followed."""
        if self.scaler is not None:
            # A scale that is given counts as no step without an overflow.
            self.scaler.update(self.scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run goes on from; nothing where nothing is scaled."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; that of a run in another precision is left aside."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))
