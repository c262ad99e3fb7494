"""The summing form of a loss that was written as a mean.

Takes a loss of torch.nn, of torch.nn.functional, or of the user; gives a callable that sums, and what the mean divided
by. Keeps true: the settings of the object that was given are not changed; a loss whose divisor cannot be known is
refused; the tensors that a loss holds go where the logits are, as a model's buffers do.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgather.errors import TrainingError
from forgather.ml.random_state import seeded_random

_PER_TARGET = (nn.CrossEntropyLoss, nn.NLLLoss)
_PER_ELEMENT = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.SoftMarginLoss,
    nn.PoissonNLLLoss,
)
_UNIT_OF_FUNCTION = {
    F.cross_entropy: "classes",
    F.nll_loss: "classes",
    F.mse_loss: "elements",
    F.l1_loss: "elements",
    F.smooth_l1_loss: "elements",
    F.huber_loss: "elements",
    F.binary_cross_entropy: "elements",
    F.binary_cross_entropy_with_logits: "elements",
    F.soft_margin_loss: "elements",
    F.poisson_nll_loss: "elements",
}
_CAUSAL_LABELS = (
    "a causal language model needs 'labels': use collators/padded.yaml (forgather.ml.data:CausalLMCollator), "
    "or a data set with a column 'labels'"
)


def as_sum(loss_fn: Callable[..., Any]) -> tuple[Callable[..., Any], bool, str]:
    """Returns the summing form of a loss, whether it divides by itself, and what its mean counts."""
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        if isinstance(loss_fn, _PER_TARGET):
            return _summing_copy(loss_fn), False, "classes"
        if isinstance(loss_fn, _PER_ELEMENT):
            return _summing_copy(loss_fn), False, "elements"
        if loss_fn.reduction in ("sum", "none"):
            return loss_fn, False, "targets"
        raise unknown_reduction(loss_fn, f"it reduces by {loss_fn.reduction!r} over a number that cannot be known")
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if accepts(function, "num_items_in_batch"):
        return loss_fn, True, "targets"
    if accepts(function, "reduction"):
        root = layers_of(function)[-1]
        if root not in _UNIT_OF_FUNCTION and getattr(F, getattr(root, "__name__", ""), None) is root:
            raise unknown_reduction(loss_fn, "the number that its mean divides by cannot be known")
        return functools.partial(loss_fn, reduction="sum"), False, _UNIT_OF_FUNCTION.get(root, "targets")
    raise unknown_reduction(loss_fn, "nothing says whether it returns a sum or a mean, and of what")


def layers_of(function: Any) -> list[Any]:
    """Returns a partial, what it calls, what that calls, ...; any other callable alone."""
    layers = [function]
    while (inner := getattr(layers[-1], "func", None)) is not None and hasattr(layers[-1], "keywords"):
        layers.append(inner)
    return layers


def takes_labels(loss_fn: Callable[..., Any]) -> bool:
    """Tells whether a loss cannot be called with the logits alone."""
    try:
        parameters = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters
    except (TypeError, ValueError):
        return False
    placed = [one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return sum(one.default is one.empty for one in placed) > 1


def has_own_mean(loss_fn: Callable[..., Any]) -> bool:
    """Tells whether a loss has a mean of which only calling it tells what it divides by: it is not one of torch."""
    if isinstance(loss_fn, _PER_TARGET + _PER_ELEMENT):
        return not type(loss_fn).__module__.startswith("torch.")
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        return False
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if layers_of(function)[-1] in _UNIT_OF_FUNCTION or not accepts(function, "reduction"):
        return False
    return bool(inspect.signature(function).parameters["reduction"].default == "mean")


def setting_of(loss_fn: Callable[..., Any], name: str, default: Any) -> Any:
    """Returns a setting of a loss: the outermost partial's keyword, or an attribute of the module."""
    for layer in layers_of(loss_fn):
        found = (getattr(layer, "keywords", None) or {}).get(name, getattr(layer, name, None))
        if found is not None:
            return found
    return default


def is_cross_entropy(loss_fn: Callable[..., Any]) -> bool:
    """Tells whether a loss is torch's cross entropy of classes, as it stands."""
    known = type(loss_fn) is nn.CrossEntropyLoss or layers_of(loss_fn)[-1] is F.cross_entropy
    return known and not setting_of(loss_fn, "label_smoothing", 0.0)


def _summing_copy(loss_fn: nn.Module) -> nn.Module:
    summing = copy.deepcopy(loss_fn)
    setattr(summing, "reduction", "sum")  # noqa: B010 - torch types attributes of modules as tensors
    return summing


def placed(loss_fn: Any, device: torch.device) -> Any:
    """Returns a loss whose tensors are on a device: buffers, attributes and arguments; what a closure holds stays.

    A module or an object is moved as it stands, a partial is made again.
    """
    if isinstance(loss_fn, nn.Module):
        for module in loss_fn.to(device).modules():
            _place_attributes(module, device)
        return loss_fn
    if isinstance(loss_fn, functools.partial):
        args = [_there(value, device) for value in loss_fn.args]
        keywords = {name: _there(value, device) for name, value in loss_fn.keywords.items()}
        return functools.partial(placed(loss_fn.func, device), *args, **keywords)
    keywords = {
        name: value.to(device)
        for name, value in (getattr(loss_fn, "keywords", None) or {}).items()
        if isinstance(value, Tensor)
    }
    if keywords:
        return functools.partial(loss_fn, **keywords)
    owner = getattr(loss_fn, "__self__", loss_fn)
    if isinstance(owner, nn.Module):
        placed(owner, device)
    elif not isinstance(owner, type):
        _place_attributes(owner, device)
    return loss_fn


def _there(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return placed(value, device) if isinstance(value, nn.Module) else value


def _place_attributes(owner: Any, device: torch.device) -> None:
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, Tensor):
            setattr(owner, name, value.to(device))


def no_labels(batch: Any, hint: str = _CAUSAL_LABELS) -> TrainingError:
    """Returns the error for a batch without labels."""
    keys = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    return TrainingError(
        f"the batch has no labels (found: {keys})",
        code="FG808",
        hint=hint,
    )


def unknown_reduction(loss_fn: Any, reason: str) -> TrainingError:
    """Returns the error for a loss that cannot be summed."""
    name, place = _named(loss_fn)
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    hint = "give it a parameter 'reduction' that understands \"sum\", or 'num_items_in_batch' to divide by"
    if accepts(function, "num_items_in_batch"):
        hint = "return the sum over the batch, divided by num_items_in_batch"
    elif accepts(function, "reduction"):
        hint = "take num_items_in_batch in place of 'reduction', and return the sum over the batch divided by it"
    return TrainingError(
        f"loss_fn {name!r}{place} cannot be summed over micro-batches: {reason}",
        code="FG806",
        hint=hint,
    ).about("loss_fn")


def _named(loss_fn: Any) -> tuple[str, str]:
    """Returns the name of a loss, and the place of its code where that is not torch's."""
    inner = layers_of(loss_fn)[-1]
    name = str(getattr(inner, "__name__", type(inner).__name__))
    code = inner if inspect.isroutine(inner) or isinstance(inner, type) else type(inner)
    try:
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return name, ""
    if file is None or (getattr(code, "__module__", None) or "").partition(".")[0] == "torch":
        return name, ""
    return name, f" ({os.path.basename(file)}:{line})"


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Tells whether a function names a parameter so."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


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
