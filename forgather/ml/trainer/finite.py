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
from forgather.ml.trainer.later import Later


class FiniteGuard:
    """Looks at the loss of each step; a `StepGuard` that stops the run.

    Args:
        optimizer: the optimizer of the run.
        device: where losses lie.
        rank: named in the message.
    """

    def __init__(self, optimizer: Any, device: torch.device, *, rank: int) -> None:
        self.optimizer = optimizer
        self.rank = rank
        self.bad: str | None = None
        self.rewinds = False
        self.waits = device.type == "cpu" or not getattr(optimizer, "_step_supports_amp_scaling", False)
        self._pending: list[tuple[int, Later]] = []

    def loss(self, loss: Tensor, step: int) -> float | Tensor:
        """Returns the loss of a step, as a number where that needs no waiting.

        Raises:
            TrainingError: FG818.
        """
        if self.waits:
            value = loss.item()
            if not math.isfinite(value):
                raise not_finite(f"the loss is {value}", step, self.rank)
            return value
        self.poll()
        self._leave_out(torch.logical_not(torch.isfinite(loss)), step)
        return loss

    def gradients(self, norm: Tensor | None, step: int) -> bool:
        """Looks at the norm of the gradients; no update is left out by the host.

        Raises:
            TrainingError: FG818.
        """
        if norm is None:
            return False
        if self.waits:
            value = norm.item()
            if not math.isfinite(value):
                raise not_finite(f"the norm of the gradients is {value}", step, self.rank)
        else:
            found = torch.logical_not(torch.isfinite(norm)).logical_or(self.optimizer.found_inf.bool())
            self._leave_out(found, step)
        return False

    def _leave_out(self, bad: Tensor, step: int) -> None:
        """Has the optimizer leave the update out where `bad` turns out true, and looks at it later."""
        self.optimizer.grad_scale = None
        self.optimizer.found_inf = bad.to(torch.float32)
        self._pending.append((step, Later(bad)))

    def poll(self, *, wait: bool = False) -> None:
        """Looks at what arrived since; `wait` looks at all of it.

        Raises:
            TrainingError: FG818.
        """
        while self._pending:
            step, bad = self._pending[0]
            if not wait and not bad.is_there:
                return
            self._pending.pop(0)
            if bool(bad.read()):
                raise not_finite("the loss or the norm of the gradients is not finite", step, self.rank)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: each step is judged by itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leaves the state of a run that judged otherwise aside."""


def not_finite(found: str, step: int, rank: int) -> TrainingError:
    """Returns the error that stops the run."""
    return TrainingError(
        f"{found} at step {step} on rank {rank}; the update was not applied",
        code="FG818",
        hint="lower learning_rate, lengthen warmup_steps, lower max_grad_norm, or look at the rows of this step; "
        "bad_step_policy: skip goes on without them",
    )
