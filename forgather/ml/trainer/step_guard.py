"""Stops a run before a loss or a gradient that is not finite reaches the weights.

Takes losses and gradient norms; gives nothing, or a `TrainingError`. Keeps true: an update with such a
loss is never applied. On the CPU looking costs nothing. On an accelerator a fused optimizer leaves the
update out by itself, and the host learns of it without waiting, at most a few steps later; with any
other optimizer the host waits for the loss.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from forgather.errors import TrainingError
from forgather.ml.distributed import collectives
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.meter import AsyncHostCopy


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
        self._pending: list[tuple[int, AsyncHostCopy]] = []

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
        self._pending.append((step, AsyncHostCopy(bad)))

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


class NormWindow:
    """The norms of the last good steps.

    Source: the skip-step optimizers of OLMo-core: mean and sample standard deviation of a rolling window, and no
        judgment before half of it is there. Differences: norms of bad steps do not enter the window, and losses are not
        looked at.

    Args:
        size: how many norms are kept.
        threshold: standard deviations above their mean from which on a norm is a spike.

    Example:
        >>> window = NormWindow(size=4, threshold=6.0)
        >>> window.limit is None
        True
        >>> for norm in (1.0, 3.0):
        ...     window.add(norm)
        >>> round(window.limit, 3)
        10.485
    """

    def __init__(self, *, size: int, threshold: float) -> None:
        self.threshold = threshold
        self.least = max(2, size // 2)
        self._norms: deque[float] = deque(maxlen=size)

    def add(self, norm: float) -> None:
        """Remembers the norm of a good step."""
        self._norms.append(norm)

    @property
    def limit(self) -> float | None:
        """The largest norm that is no spike; None while there are too few norms to tell."""
        if len(self._norms) < self.least:
            return None
        mean, deviation = self._moments()
        return mean + self.threshold * deviation

    def _moments(self) -> tuple[float, float]:
        mean = math.fsum(self._norms) / len(self._norms)
        variance = math.fsum((norm - mean) ** 2 for norm in self._norms) / (len(self._norms) - 1)
        return mean, math.sqrt(variance)

    def described(self) -> str:
        """Returns mean and standard deviation, for people."""
        mean, deviation = self._moments()
        return f"the last {len(self._norms)} had a mean of {mean:.4g} and a standard deviation of {deviation:.3g}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the norms, as plain numbers."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the norms of a checkpoint; a window that is smaller now keeps the last of them."""
        self._norms.clear()
        self._norms.extend(state["norms"])


class Policy(StrEnum):
    """What is done about a bad step."""

    STOP = "stop"
    SKIP = "skip"
    REWIND = "rewind"


class StepGuard(Protocol):
    """What looks at a step before it changes the weights.

    `bad` says what is wrong with the present step; None for nothing, as far as is known. `rewinds` is true where a bad
    step sends the run back to its last checkpoint.
    """

    bad: str | None
    rewinds: bool

    def loss(self, loss: Tensor, step: int) -> float | Tensor:
        """Looks at the loss of a step and returns it."""
        ...

    def gradients(self, norm: Tensor | None, step: int) -> bool:
        """Looks at the norm of the gradients; tells whether the update is to be left out."""
        ...

    def poll(self, *, wait: bool = False) -> None:
        """Looks at what arrived since; `wait` looks at all of it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns what judgments depend on, as plain numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Judges from here on as the run of a checkpoint does."""
        ...


class BadSteps:
    """Judges each step before its update. The host waits for the loss and for the norm.

    Args:
        args: policy, threshold and window.
        rank: named in messages.
    """

    def __init__(self, args: TrainingArguments, *, rank: int) -> None:
        self.policy = Policy(args.bad_step_policy)
        self.rewinds = self.policy is Policy.REWIND
        self.rank = rank
        self.bad: str | None = None
        threshold = args.spike_threshold
        self._window = None if threshold is None else NormWindow(size=args.spike_window, threshold=threshold)

    def loss(self, loss: Tensor, step: int) -> float:
        """Looks at the loss of a step and returns it.

        Raises:
            TrainingError: FG818 where bad steps stop the run.
        """
        value = loss.item()
        if math.isinf(collectives.largest(_or_infinite(value))):
            self._found(_told("the loss", value), step)
        return value

    def gradients(self, norm: Tensor | None, step: int) -> bool:
        """Looks at the norm of the gradients; tells whether the update is to be left out.

        Raises:
            TrainingError: FG818 and FG650 where bad steps stop the run.
        """
        if norm is None:
            return False
        value = norm.item()
        largest = collectives.largest(_or_infinite(value))
        if math.isinf(largest):
            self._found(_told("the norm of the gradients", value), step)
        elif self._window is not None:
            limit = self._window.limit
            if limit is not None and largest > limit:
                self._found(
                    f"the norm of the gradients is {largest:.4g}; {self._window.described()}", step, spikes=True
                )
            else:
                self._window.add(largest)
        return self.bad is not None

    def _found(self, what: str, step: int, *, spikes: bool = False) -> None:
        if self.policy is not Policy.STOP:
            self.bad = what
        elif spikes:
            raise TrainingError(
                f"step {step} is a spike: {what}; the update was not applied",
                code="FG650",
                hint="set bad_step_policy: skip or rewind to go on without it, or raise spike_threshold",
            )
        else:
            raise not_finite(what, step, self.rank)

    def poll(self, *, wait: bool = False) -> None:
        """Does nothing: every step was looked at when it was there."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what judgments depend on, as plain numbers."""
        return {} if self._window is None else self._window.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Judges from here on as the run of a checkpoint does; one that did not look at norms knows none."""
        if self._window is not None:
            self._window.load_state_dict({"norms": [], **state})


def guard_of(args: TrainingArguments, optimizer: Any, device: torch.device, *, rank: int) -> StepGuard:
    """Returns what looks at the steps of a run; nobody waits where only a number that is not finite stops it."""
    if args.bad_step_policy == Policy.STOP and args.spike_threshold is None:
        return FiniteGuard(optimizer, device, rank=rank)
    return BadSteps(args, rank=rank)


def _or_infinite(value: float) -> float:
    """Returns a number that can be compared: infinity in place of what is none."""
    return abs(value) if math.isfinite(value) else math.inf


def _told(what: str, value: float) -> str:
    return f"{what} is {value}" if not math.isfinite(value) else f"{what} is not finite on another rank"
