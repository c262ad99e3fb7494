"""Step guards: checks of loss and gradient norm before an optimizer step changes the weights.

`FiniteGuard` stops the run at the first loss or norm that is not finite. On an accelerator the host does not wait for
the device: the step is left out on the device, and the host reads the result a few steps later. With DeepSpeed, and
with an optimizer of an unknown library, the host waits for the loss and the norm. `BadSteps` also detects spikes
(unusually large gradient norms), and can skip steps or request a rewind; the host always waits. With both guards, a
step whose loss or norm is bad does not change the weights.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from forgather.errors import TrainingError
from forgather.ml.distributed import collectives
from forgather.ml.host_reads import host_can_read
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.meter import AsyncHostCopy


class StepGuard:
    """Checks the loss and the gradient norm of a step before the step changes the weights.

    Args:
        rank: the rank of this process, which error messages contain.

    Attributes:
        bad: a description of what is wrong with the current step; None if no fault was found so far.
        fault: the number of the last bad step, and what is wrong with it; None if there was none.
        rewinds: whether the run goes back to the last checkpoint after a bad step.
    """

    rewinds = False

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        self.bad: str | None = None
        self.fault: tuple[int, str] | None = None

    def loss(self, loss: Tensor, step: int) -> float | Tensor:
        """Checks the loss of a step, and returns the loss.

        The result is a float, or the given tensor if reading the value would wait for the device.

        Args:
            loss: the loss of the step, summed over all ranks.
            step: the number of the step, which the error message contains.

        Shapes:
            loss: a scalar tensor.

        Raises:
            TrainingError: FG818 if the loss is not finite and the run must stop.
        """
        raise NotImplementedError

    def gradients(self, norm: Tensor | None, step: int) -> bool:
        """Checks the gradient norm of a step, and returns whether the caller must skip the optimizer step.

        Args:
            norm: the norm of all gradients before clipping; None if it was not computed.
            step: the number of the step, which the error message contains.

        Shapes:
            norm: a scalar tensor.

        Raises:
            TrainingError: FG818 or FG650 if the norm is bad and the run must stop.
        """
        raise NotImplementedError

    def poll(self, *, wait: bool = False) -> None:
        """Raises an error if the device found an earlier step bad, and the host has received that result.

        Args:
            wait: whether to wait for the results of all earlier steps.

        Raises:
            TrainingError: FG818 if an earlier step was bad and the run must stop.
        """

    def _not_finite(self, found: str, step: int) -> TrainingError:
        self.fault = (step, found)
        return not_finite(found, step, self.rank)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state on which the checks of later steps depend."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned. The state of another class of guard is ignored."""


class FiniteGuard(StepGuard):
    """A step guard that stops the run at a loss or a norm that is not finite.

    Args:
        optimizer: the optimizer of the run.
        device: the device of the losses.
        skips_on_device: whether the optimizer's `found_inf` can leave out a step on the device.
        rank: the rank of this process, which error messages contain.
    """

    def __init__(self, optimizer: Any, device: torch.device, *, skips_on_device: bool = True, rank: int) -> None:
        super().__init__(rank=rank)
        self.optimizer = optimizer
        # Fused optimizers of torch skip the step on the device if `found_inf` is set, as for a gradient scaler; for
        # others, the strategy undoes it.
        self.waits = host_can_read(device) or not skips_on_device
        # A list: the device may be several steps behind the host.
        self._pending: list[tuple[int, AsyncHostCopy]] = []

    def loss(self, loss: Tensor, step: int) -> float | Tensor:
        """Checks the loss of a step, and returns it as `StepGuard.loss` does.

        Raises:
            TrainingError: FG818 if the loss of this step, or the loss or norm of an earlier one, is not finite.
        """
        if self.waits:
            value = loss.item()
            if not math.isfinite(value):
                raise self._not_finite(f"the loss is {value}", step)
            return value
        # Each step reads the flags of earlier steps that have arrived, so the run stops a few steps late at most.
        self.poll()
        self._leave_out(torch.logical_not(torch.isfinite(loss)), step)
        return loss

    def gradients(self, norm: Tensor | None, step: int) -> bool:
        """Checks the gradient norm of a step, and returns False: the caller never has to skip a step.

        Raises:
            TrainingError: FG818 if the norm is not finite and the optimizer cannot skip the step on the device.
        """
        if norm is None:
            return False
        if self.waits:
            value = norm.item()
            if not math.isfinite(value):
                raise self._not_finite(f"the norm of the gradients is {value}", step)
        else:
            # Combined with the result for the loss: the optimizer reads a single `found_inf`.
            found = torch.logical_not(torch.isfinite(norm)).logical_or(self.optimizer.found_inf.bool())
            self._leave_out(found, step)
        return False

    def _leave_out(self, bad: Tensor, step: int) -> None:
        """Makes the optimizer skip the step if `bad` is true on the device. The host reads `bad` in a later step."""
        # torch's fused optimizers read both attributes; None means that gradients are not scaled.
        self.optimizer.grad_scale = None
        self.optimizer.found_inf = bad.to(torch.float32)
        self._pending.append((step, AsyncHostCopy(bad)))

    def poll(self, *, wait: bool = False) -> None:
        """Raises an error if the device found an earlier step bad, and the host has received that result.

        Args:
            wait: whether to wait for the results of all earlier steps.

        Raises:
            TrainingError: FG818 if the loss or the gradient norm of an earlier step is not finite.
        """
        while self._pending:
            # In order: the error names the first bad step, whose rows are the ones to look at.
            step, bad = self._pending[0]
            if not wait and not bad.is_there:
                return
            self._pending.pop(0)
            if bool(bad.read()):
                raise self._not_finite("the loss or the norm of the gradients is not finite", step)


def not_finite(found: str, step: int, rank: int) -> TrainingError:
    """Returns the FG818 error that stops the run.

    Args:
        found: a description of the value that is not finite.
        step: the number of the bad step.
        rank: the rank that found the value.
    """
    return TrainingError(
        f"{found} at step {step} on rank {rank}; the update was not applied",
        code="FG818",
        hint="lower learning_rate, lengthen warmup_steps, lower max_grad_norm, or look at the rows of this step; "
        "bad_step_policy: skip continues without them",
    )


class NormWindow:
    """The gradient norms of recent good steps, and the limit above which a norm is a spike.

    Args:
        size: the number of recent norms that are kept.
        threshold: how many standard deviations the limit lies above the mean of the norms.

    Example:
        >>> window = NormWindow(size=4, threshold=6.0)
        >>> window.limit is None
        True
        >>> for norm in (1.0, 3.0):
        ...     window.add(norm)
        >>> round(window.limit, 3)
        10.485

    Source:
        The skip-step optimizers of OLMo-core: mean and sample standard deviation of a rolling window, and no limit
        until half of the window is filled. Differences: the norms of bad steps are not added to the window, and losses
        are not checked.
    """

    def __init__(self, *, size: int, threshold: float) -> None:
        self.threshold = threshold
        # A standard deviation needs two values; half a window avoids judging by the first, steep steps of a run.
        self.least = max(2, size // 2)
        self._norms: deque[float] = deque(maxlen=size)

    def add(self, norm: float) -> None:
        """Adds the gradient norm of a good step; the oldest norm is dropped if the window is full."""
        self._norms.append(norm)

    @property
    def limit(self) -> float | None:
        """The largest norm that is not a spike; None until half of the window is filled."""
        if len(self._norms) < self.least:
            return None
        mean, deviation = self._moments()
        return mean + self.threshold * deviation

    def _moments(self) -> tuple[float, float]:
        # Exact sums, computed again each time: the limit must not depend on when the run was resumed.
        mean = math.fsum(self._norms) / len(self._norms)
        variance = math.fsum((norm - mean) ** 2 for norm in self._norms) / (len(self._norms) - 1)
        return mean, math.sqrt(variance)

    def described(self) -> str:
        """Returns a clause for messages that gives the mean and the standard deviation of the norms."""
        mean, deviation = self._moments()
        return f"the last {len(self._norms)} had a mean of {mean:.4g} and a standard deviation of {deviation:.3g}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the norms, oldest first."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the norms that `state_dict` returned; if the window is smaller now, the oldest norms are dropped."""
        self._norms.clear()
        self._norms.extend(state["norms"])


class Policy(StrEnum):
    """The reaction to a bad step: one whose loss or gradient norm is not finite, or whose gradient norm is a spike."""

    STOP = "stop"
    SKIP = "skip"
    REWIND = "rewind"


class BadSteps(StepGuard):
    """A step guard that detects spikes and can skip bad steps. The host waits for the loss and the norm of each step.

    Args:
        args: the training arguments, whose `bad_step_policy`, `spike_threshold` and `spike_window` are read.
        rank: the rank of this process, which error messages contain.
    """

    def __init__(self, args: TrainingArguments, *, rank: int) -> None:
        super().__init__(rank=rank)
        self.policy = Policy(args.bad_step_policy)
        self.rewinds = self.policy is Policy.REWIND
        threshold = args.spike_threshold
        self._window = None if threshold is None else NormWindow(size=args.spike_window, threshold=threshold)

    def loss(self, loss: Tensor, step: int) -> float:
        """Checks the loss of a step, and returns it as a float. Collective: every process must call it.

        Raises:
            TrainingError: FG818 if the loss is not finite and `bad_step_policy` is "stop".
        """
        value = loss.item()
        # A value may be bad on one rank alone; the largest one decides, so that all ranks take the same decision.
        if math.isinf(collectives.all_max(_or_infinite(value))):
            self._found(_describe("the loss", value), step)
        return value

    def gradients(self, norm: Tensor | None, step: int) -> bool:
        """Checks the gradient norm of a step, and returns whether the caller must skip the optimizer step.

        Collective: every process must call it.

        Raises:
            TrainingError: if `bad_step_policy` is "stop": FG818 if the norm is not finite, FG650 if it is a spike.
        """
        if norm is None:
            return False
        value = norm.item()
        largest = collectives.all_max(_or_infinite(value))
        if math.isinf(largest):
            self._found(_describe("the norm of the gradients", value), step)
        elif self._window is not None:
            limit = self._window.limit
            if limit is not None and largest > limit:
                self._found(
                    f"the norm of the gradients is {largest:.4g}; {self._window.described()}", step, spikes=True
                )
            else:
                # Norms of bad steps stay out: after one spike the limit would be too high for the next one.
                self._window.add(largest)
        return self.bad is not None

    def _found(self, what: str, step: int, *, spikes: bool = False) -> None:
        # Only recorded: the loop still has to discard the gradients and add the rows to the list of skipped steps.
        self.fault = (step, what)
        if self.policy is not Policy.STOP:
            self.bad = what
        elif spikes:
            raise TrainingError(
                f"step {step} is a spike: {what}; the update was not applied",
                code="FG650",
                hint="set bad_step_policy: skip or rewind to continue without it, or raise spike_threshold",
            )
        else:
            raise not_finite(what, step, self.rank)

    def state_dict(self) -> dict[str, Any]:
        """Returns the recent gradient norms; empty without spike detection."""
        return {} if self._window is None else self._window.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the norms that `state_dict` returned. A state without norms clears the window."""
        if self._window is not None:
            # Also an empty state clears the window: after a rewind, later norms must not count.
            self._window.load_state_dict({"norms": [], **state})


def choose_guard(
    args: TrainingArguments, optimizer: Any, device: torch.device, *, skips_on_device: bool = True, rank: int
) -> StepGuard:
    """Returns the step guard of a run.

    Args:
        args: the training arguments, whose `bad_step_policy` and `spike_threshold` select the guard.
        optimizer: the optimizer of the run.
        device: the device of the losses.
        skips_on_device: whether the optimizer's `found_inf` can leave out a step on the device.
        rank: the rank of this process, which error messages contain.
    """
    # The guard that does not wait for the device suffices here.
    if args.bad_step_policy == Policy.STOP and args.spike_threshold is None:
        return FiniteGuard(optimizer, device, skips_on_device=skips_on_device, rank=rank)
    return BadSteps(args, rank=rank)


def _or_infinite(value: float) -> float:
    """Returns the absolute value of a number; infinity for NaN, which an all-reduce with max cannot compare."""
    return abs(value) if math.isfinite(value) else math.inf


def _describe(what: str, value: float) -> str:
    return f"{what} is {value}" if not math.isfinite(value) else f"{what} is not finite on another rank"
