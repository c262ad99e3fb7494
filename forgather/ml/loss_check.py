"""Does a loss of the user divide by what it is taken to divide by, and compare what belongs together.

Takes a loss and a batch; gives nothing, or FG806 or FG869. Keeps true: the loss of an update is the one that the user's
function returns for all its rows at once. No signature tells what a mean divides by (targets, class weights that the
function holds, elements), nor whether a parameter has an effect, so the first batches tell.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forgather.errors import TrainingError
from forgather.ml.loss_sums import has_own_mean, unknown_reduction
from forgather.ml.random_state import seeded_random

_CHECKED_BATCHES = 4
_TOLERANCE = 1e-3


class DivisorCheck:
    """Compares the sum of a loss over a batch with its mean, batch by batch until a few agree.

    Args:
        loss_fn: as the user gave it.
        divides: it divides by `num_items_in_batch` itself.
    """

    def __init__(self, loss_fn: Callable[..., Any], *, divides: bool) -> None:
        self._loss_fn, self._divides = loss_fn, divides
        self._left = _CHECKED_BATCHES if divides or has_own_mean(loss_fn) else 0

    def __call__(
        self, call: Callable[..., Any], total: Tensor, divisor: Callable[[], Any], given: tuple[Any, ...]
    ) -> None:
        """Compares a sum with what the loss gives otherwise.

        Args:
            call: the summing form, or the loss that divides by itself.
            total: the sum over the batch.
            divisor: tells what the mean over the batch is taken to divide by, or what the loss was told to divide by.
            given: logits, and labels where there are any.

        Raises:
            TrainingError: FG806 where the mean divides by another number.
        """
        if not self._left or total.device.type == "meta":
            return
        expected, number = float(total.detach()), float(divisor())
        if not number or not expected or not math.isfinite(expected):
            return
        mean, tolerance = self._mean(call, divisor(), given)
        if math.isfinite(mean) and abs(mean * number - expected) > tolerance * abs(expected):
            # A loss that draws had other draws in training: both forms are compared on the same ones.
            expected = self._sum(call, divisor(), given)
            if abs(mean * number - expected) > tolerance * abs(expected):
                raise unknown_reduction(self._loss_fn, self._reason(mean, expected, number, tolerance))
        self._left -= 1

    def _mean(self, call: Callable[..., Any], divisor: Any, given: tuple[Any, ...]) -> tuple[float, float]:
        """Returns the mean that the loss gives, and how much of it may be rounding."""
        own = _apart(call)
        if self._divides:  # half of the sum's share, as it is told to divide by twice as much
            loss = 2 * _undrawn(functools.partial(own, num_items_in_batch=2 * divisor), given)
        elif isinstance(own, nn.Module):
            setattr(own, "reduction", "mean")  # noqa: B010 - torch types attributes of modules as tensors
            loss = _undrawn(own, given)
        else:
            loss = _undrawn(functools.partial(own, reduction="mean"), given)
        return float(loss), max(_TOLERANCE, 4 * torch.finfo(loss.dtype).eps)

    def _sum(self, call: Callable[..., Any], divisor: Any, given: tuple[Any, ...]) -> float:
        own = _apart(call)
        if self._divides:
            return float(_undrawn(functools.partial(own, num_items_in_batch=divisor), given) * divisor)
        return float(_undrawn(own, given))

    def _reason(self, mean: float, total: float, number: float, tolerance: float) -> str:
        if self._divides:
            return "it takes num_items_in_batch, and what it returns is no sum divided by it"
        if abs(mean - total) <= tolerance * abs(total):
            return 'it returns the same with reduction "sum" as with "mean"'
        return f"its mean over the batch divides by {total / mean:.6g}, and the batch has {number:g} targets"


class PairCheck:
    """Refuses a loss that compares each of the logits with every label, where shapes differ by an axis of one.

    A function of the user may bring both to one shape by itself. It does where logits of that shape give the same, or
    where the sum over a batch is that of its rows: stretched, a batch of N rows has N * N pairs.

    Args:
        is_elementwise: it is one of torch that takes logits and labels of one shape.
    """

    def __init__(self, *, is_elementwise: bool) -> None:
        self._is_elementwise = is_elementwise
        self._is_judged = False

    def __call__(self, call: Callable[..., Any], given: tuple[Any, ...]) -> None:
        """Looks at what the loss makes of logits and labels of different shapes.

        Args:
            call: the summing form of the loss.
            given: logits and labels.

        Raises:
            TrainingError: FG869.
        """
        logits, labels = given
        if logits.device.type == "meta" or not labels.ndim:
            return
        if self._is_elementwise:
            raise _broadcast(logits, labels)
        if self._is_judged or not labels.is_floating_point() or len(labels) != len(logits) or len(labels) < 2:
            return
        if [size for size in logits.shape if size > 1] != [size for size in labels.shape if size > 1]:
            return
        self._is_judged = True
        own = _apart(call)
        found = _undrawn(own, given)
        paired = _tried(own, (logits.reshape(labels.shape), labels))
        first, rest = (_tried(own, (logits[rows], labels[rows])) for rows in (slice(1), slice(1, None)))
        # A function that takes neither of these cannot be judged.
        others = [paired, None if first is None or rest is None else first + rest]
        known = [other for other in others if other is not None]
        if known and not any(torch.allclose(found, other, rtol=_TOLERANCE, equal_nan=True) for other in known):
            raise _broadcast(logits, labels)


def _tried(loss_fn: Callable[..., Any], given: tuple[Any, ...]) -> Tensor | None:
    try:
        return _undrawn(loss_fn, given)
    except Exception:  # noqa: BLE001 - a function of the user that cannot be called so; training calls it as it is
        return None


def _broadcast(logits: Tensor, labels: Tensor) -> TrainingError:
    return TrainingError(
        f"the loss compares logits of shape {tuple(logits.shape)} with labels of shape {tuple(labels.shape)}: torch "
        "stretches both, and pairs numbers that do not belong together",
        code="FG869",
        hint="give both one shape: end the model with .squeeze(-1), or keep the axis of one in the labels",
    ).about("loss_fn")


def _undrawn(loss_fn: Callable[..., Any], given: tuple[Any, ...]) -> Tensor:
    """Returns what a loss gives on the same draws as ever; the run draws as if it had not been called."""
    with torch.no_grad(), seeded_random(0):
        loss: Tensor = loss_fn(*given)
        return loss if loss.ndim == 0 else loss.sum()


def _apart(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss whose call leaves no trace in the one that trains: modules may count what they see."""
    holds_module = isinstance(call, nn.Module) or isinstance(getattr(call, "func", None), nn.Module)
    return copy.deepcopy(call) if holds_module else call
