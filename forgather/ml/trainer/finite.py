"""Stops a run before a loss or a gradient that is not finite reaches the weights.

Takes losses and gradient norms; gives nothing, or a `TrainingError`. Keeps true: an update with such a
loss is never applied. On the CPU looking costs nothing. On an accelerator a fused optimizer leaves the
update out by itself, and the host learns of it without waiting, at most a few steps later; with any
other optimizer the host waits for the loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forgather.errors import TrainingError


class FiniteGuard:
    """Looks at the loss of each step.

    Args:
        optimizer: the optimizer of the run.
        rank: named in the message.
    """

    def __init__(self, optimizer: Any, *, rank: int) -> None:
        self.optimizer = optimizer
        self.rank = rank
        self.skips_by_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._pending: list[tuple[int, Tensor, torch.Event]] = []

    def loss(self, loss: Tensor, step: int) -> float | Tensor:
        """Returns the loss of a step, as a number where that needs no waiting.

        Raises:
            TrainingError: FG818.
        """
        if loss.device.type == "cpu" or not self.skips_by_itself:
            value = loss.item()
            if not math.isfinite(value):
                raise self.error(f"the loss is {value}", step)
            return value
        self.poll()
        bad = torch.logical_not(torch.isfinite(loss))
        self.optimizer.grad_scale = None
        self.optimizer.found_inf = bad.to(torch.float32).reshape(1)
        copy = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(bad, non_blocking=True)
        self._pending.append((step, copy, torch.accelerator.current_stream().record_event()))
        return loss

    def gradients(self, norm: Tensor | None, step: int) -> None:
        """Looks at the norm of the gradients, where that needs no waiting.

        Raises:
            TrainingError: FG818.
        """
        if norm is None:
            return
        if norm.device.type != "cpu":
            if self.skips_by_itself and (found := getattr(self.optimizer, "found_inf", None)) is not None:
                found.add_(torch.logical_not(torch.isfinite(norm))).clamp_(max=1)
            return
        value = norm.item()
        if not math.isfinite(value):
            raise self.error(f"the norm of the gradients is {value}", step)

    def poll(self, *, wait: bool = False) -> None:
        """Looks at the losses that arrived since; `wait` looks at all of them.

        Raises:
            TrainingError: FG818.
        """
        while self._pending and (wait or self._pending[0][2].query()):
            step, bad, event = self._pending.pop(0)
            event.synchronize()
            if bool(bad):
                raise self.error("the loss is not finite", step)

    def error(self, found: str, step: int) -> TrainingError:
        """Returns the error that stops the run."""
        return TrainingError(
            f"{found} at step {step} on rank {self.rank}; the update was not applied",
            code="FG818",
            hint="lower learning_rate, lengthen warmup_steps, lower max_grad_norm, or look at the rows of this step",
        )
