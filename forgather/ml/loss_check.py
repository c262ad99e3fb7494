"""Does a loss of the user divide by what it is taken to divide by.

Takes a loss and a batch; gives nothing, or FG806. Keeps true: the loss of an update is the one that the user's function
returns for all its rows at once. No signature tells what a mean divides by (targets, class weights that the function
holds, elements), nor whether a parameter has an effect, so the first batches tell.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.loss_sums import has_own_mean, unknown_reduction

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
        devices = [total.device] if total.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):  # an extra call must not change what the run draws
            mean = _halved(call, divisor(), given) * 2 if self._divides else _mean(call, given)
        self._left -= 1
        if not math.isfinite(mean) or abs(mean * number - expected) <= _TOLERANCE * abs(expected):
            return
        raise unknown_reduction(self._loss_fn, self._reason(mean, expected, number))

    def _reason(self, mean: float, total: float, number: float) -> str:
        if self._divides:
            return "it takes num_items_in_batch, and what it returns is no sum divided by it"
        if abs(mean - total) <= _TOLERANCE * abs(total):
            return 'it returns the same with reduction "sum" as with "mean"'
        return f"its mean over the batch divides by {total / mean:.6g}, and the batch has {number:g} targets"


def _halved(call: Callable[..., Any], divisor: float | Tensor, given: tuple[Any, ...]) -> float:
    return _number(_apart(call)(*given, num_items_in_batch=2 * divisor))


def _mean(call: Callable[..., Any], given: tuple[Any, ...]) -> float:
    own = _apart(call)
    if isinstance(own, nn.Module):
        setattr(own, "reduction", "mean")  # noqa: B010 - torch types attributes of modules as tensors
        return _number(own(*given))
    return _number(own(*given, reduction="mean"))


def _number(loss: Tensor) -> float:
    return float(loss if loss.ndim == 0 else loss.sum())


def _apart(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss whose call leaves no trace in the one that trains: modules may count what they see."""
    holds_module = isinstance(call, nn.Module) or isinstance(getattr(call, "func", None), nn.Module)
    return copy.deepcopy(call) if holds_module else call
