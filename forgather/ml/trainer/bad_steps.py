"""What becomes of a step whose loss or gradients are not finite, or whose gradients spike.

Takes losses and gradient norms; gives the verdict on each step, before its update. Keeps true: every process comes to
the same verdict, also where one alone computed something that is not finite; norms of bad steps judge no later ones.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from forgather.errors import TrainingError
from forgather.ml.distributed import collectives
from forgather.ml.trainer.args import TrainingArguments
from forgather.ml.trainer.finite import FiniteGuard, not_finite
from forgather.ml.trainer.spikes import NormWindow


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
