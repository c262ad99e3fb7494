"""Conversion of a loss that returns a mean into one that returns a sum, and checks of the result.

`as_sum` takes a loss of torch.nn, of torch.nn.functional, or of the user. It returns a callable that computes the sum,
and the unit in which the mean's divisor is counted. The given loss is not changed. A loss whose divisor is unknown is
refused. The tensors in a loss (such as class weights) are moved to the device of the logits.
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

# The divisor of a mean: the number of targets (or the sum of their class weights), or the number of elements.
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
    """Returns a callable that sums a loss, whether this callable divides by a given number, and the divisor's unit.

    Args:
        loss_fn: a loss module, or a function with a parameter `reduction` or `num_items_in_batch`.

    Returns:
        The callable, whether it divides by `num_items_in_batch`, and the unit: "classes", "elements" or "targets".

    Raises:
        TrainingError: FG806 if the sum or the divisor of the loss is unknown.
    """
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        if isinstance(loss_fn, _PER_TARGET):
            return _summing_copy(loss_fn), False, "classes"
        if isinstance(loss_fn, _PER_ELEMENT):
            return _summing_copy(loss_fn), False, "elements"
        if loss_fn.reduction in ("sum", "none"):
            return loss_fn, False, "targets"
        raise unknown_reduction(loss_fn, f"the number that its reduction {loss_fn.reduction!r} divides by is unknown")
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if accepts(function, "num_items_in_batch"):
        return loss_fn, True, "targets"
    if accepts(function, "reduction"):
        root = layers_of(function)[-1]
        # The divisor of other functions of torch is not known.
        if root not in _UNIT_OF_FUNCTION and getattr(F, getattr(root, "__name__", ""), None) is root:
            raise unknown_reduction(loss_fn, "the number that its mean divides by is unknown")
        return functools.partial(loss_fn, reduction="sum"), False, _UNIT_OF_FUNCTION.get(root, "targets")
    raise unknown_reduction(loss_fn, "whether it returns a sum or a mean is unknown")


def layers_of(function: Any) -> list[Any]:
    """Returns a list of a callable and, if it is a partial, of the callables that it wraps; the innermost is last."""
    layers = [function]
    while (inner := getattr(layers[-1], "func", None)) is not None and hasattr(layers[-1], "keywords"):
        layers.append(inner)
    return layers


def takes_labels(loss_fn: Callable[..., Any]) -> bool:
    """Returns whether a loss has at least two required arguments, the second of which is for labels."""
    try:
        parameters = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).parameters
    except (TypeError, ValueError):
        return False
    positional = [one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return sum(one.default is one.empty for one in positional) > 1


def has_own_mean(loss_fn: Callable[..., Any]) -> bool:
    """Returns whether a loss computes its mean with code that is not torch's, so that only a call shows the divisor."""
    # A subclass of the user may override `forward`, and then divide by any number.
    if isinstance(loss_fn, _PER_TARGET + _PER_ELEMENT):
        return not type(loss_fn).__module__.startswith("torch.")
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        return False
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if layers_of(function)[-1] in _UNIT_OF_FUNCTION or not accepts(function, "reduction"):
        return False
    return bool(inspect.signature(function).parameters["reduction"].default == "mean")


def setting_of(loss_fn: Callable[..., Any], name: str, default: Any) -> Any:
    """Returns the value of a setting of a loss: a keyword argument of a partial, or an attribute of the module.

    Args:
        loss_fn: the loss.
        name: the name of the setting.
        default: the value to return if the setting is not found or is None.
    """
    for layer in layers_of(loss_fn):
        found = (getattr(layer, "keywords", None) or {}).get(name, getattr(layer, name, None))
        if found is not None:
            return found
    return default


def is_cross_entropy(loss_fn: Callable[..., Any]) -> bool:
    """Returns whether a loss is torch's cross entropy without label smoothing."""
    known = type(loss_fn) is nn.CrossEntropyLoss or layers_of(loss_fn)[-1] is F.cross_entropy
    return known and not setting_of(loss_fn, "label_smoothing", 0.0)


def _summing_copy(loss_fn: nn.Module) -> nn.Module:
    # A copy, since the user's object may be used elsewhere, for example as a metric.
    summing = copy.deepcopy(loss_fn)
    setattr(summing, "reduction", "sum")  # noqa: B010 - torch annotates attributes of modules as tensors
    return summing


def on_device(loss_fn: Any, device: torch.device) -> Any:
    """Returns a loss whose tensors, except those in a closure, are on a device.

    Args:
        loss_fn: the loss. A module or an object is changed in place; a partial is rebuilt.
        device: the device of the logits.
    """
    if isinstance(loss_fn, nn.Module):
        for module in loss_fn.to(device).modules():
            _move_attributes(module, device)
        return loss_fn
    if isinstance(loss_fn, functools.partial):
        args = [_value_on_device(value, device) for value in loss_fn.args]
        keywords = {name: _value_on_device(value, device) for name, value in loss_fn.keywords.items()}
        return functools.partial(on_device(loss_fn.func, device), *args, **keywords)
    keywords = {
        name: value.to(device)
        for name, value in (getattr(loss_fn, "keywords", None) or {}).items()
        if isinstance(value, Tensor)
    }
    if keywords:
        return functools.partial(loss_fn, **keywords)
    owner = getattr(loss_fn, "__self__", loss_fn)
    if isinstance(owner, nn.Module):
        on_device(owner, device)
    elif not isinstance(owner, type):
        _move_attributes(owner, device)
    return loss_fn


def _value_on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return on_device(value, device) if isinstance(value, nn.Module) else value


def _move_attributes(owner: Any, device: torch.device) -> None:
    # `Module.to` moves parameters and buffers only.
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, Tensor):
            setattr(owner, name, value.to(device))


def no_labels(batch: Any, hint: str = _CAUSAL_LABELS) -> TrainingError:
    """Returns the FG808 error, for a batch without labels.

    Args:
        batch: the batch whose keys the message lists.
        hint: the hint of the error.
    """
    keys = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    return TrainingError(f"the batch has no labels (found: {keys})", code="FG808", hint=hint)


def unknown_reduction(loss_fn: Any, reason: str) -> TrainingError:
    """Returns the FG806 error, for a loss that cannot be converted to a sum.

    Args:
        loss_fn: the loss that the message names.
        reason: the reason why the loss cannot be converted.
    """
    name, place = _name_and_place(loss_fn)
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    hint = "give it a parameter 'reduction' that accepts \"sum\", or 'num_items_in_batch' to divide by"
    if accepts(function, "num_items_in_batch"):
        hint = "return the sum over the batch, divided by num_items_in_batch"
    elif accepts(function, "reduction"):
        hint = "take num_items_in_batch in place of 'reduction', and return the sum over the batch divided by it"
    return TrainingError(
        f"loss_fn {name!r}{place} cannot be summed over micro-batches: {reason}",
        code="FG806",
        hint=hint,
    ).about("loss_fn")


def _name_and_place(loss_fn: Any) -> tuple[str, str]:
    """Returns the name of a loss, and the location of its code in parentheses, or "" if the code is torch's."""
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
    """Returns whether a function has a parameter with the given name.

    Args:
        function: the function whose signature is inspected.
        name: the name of the parameter.
    """
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


_CHECKED_BATCHES = 4
_TOLERANCE = 1e-3


class DivisorCheck:
    """Compares the sum of a loss over a batch with its mean, until four batches agree.

    The check finds a loss whose mean has another divisor than the assumed one. Such a loss would scale the gradients.

    Args:
        loss_fn: the loss, as the user gave it.
        divides: True if the loss itself divides by `num_items_in_batch`.
    """

    def __init__(self, loss_fn: Callable[..., Any], *, divides: bool) -> None:
        self._loss_fn, self._divides = loss_fn, divides
        self._left = _CHECKED_BATCHES if divides or has_own_mean(loss_fn) else 0

    def __call__(
        self, call: Callable[..., Any], total: Tensor, divisor: Callable[[], Any], given: tuple[Any, ...]
    ) -> None:
        """Compares the sum of a loss over a batch with the loss's own mean.

        Args:
            call: the summing form of the loss, or the loss that itself divides by `num_items_in_batch`.
            total: the sum over the batch.
            divisor: a function that returns the divisor of the mean: the assumed one, or the given
                `num_items_in_batch`.
            given: a tuple of the logits, and of the labels if there are any.

        Raises:
            TrainingError: FG806 if the mean is divided by another number than the assumed one.

        Shapes:
            total: a scalar tensor.
        """
        if not self._left or total.device.type == "meta":  # a dry run has no values
            return
        expected, number = float(total.detach()), float(divisor())
        if not number or not expected or not math.isfinite(expected):
            return
        mean, tolerance = self._mean(call, divisor(), given)
        if math.isfinite(mean) and abs(mean * number - expected) > tolerance * abs(expected):
            # A loss with random numbers drew others in training: both forms are recomputed with the same ones.
            expected = self._sum(call, divisor(), given)
            if abs(mean * number - expected) > tolerance * abs(expected):
                raise unknown_reduction(self._loss_fn, self._reason(mean, expected, number, tolerance))
        self._left -= 1

    def _mean(self, call: Callable[..., Any], divisor: Any, given: tuple[Any, ...]) -> tuple[float, float]:
        """Returns the mean that the loss computes, and the relative tolerance for rounding."""
        own = _isolated_copy(call)
        if self._divides:  # with twice the divisor a correct loss gives half, one that ignores it the same
            loss = 2 * _with_fixed_seed(functools.partial(own, num_items_in_batch=2 * divisor), given)
        elif isinstance(own, nn.Module):
            setattr(own, "reduction", "mean")  # noqa: B010 - torch types attributes of modules as tensors
            loss = _with_fixed_seed(own, given)
        else:
            loss = _with_fixed_seed(functools.partial(own, reduction="mean"), given)
        return float(loss), max(_TOLERANCE, 4 * torch.finfo(loss.dtype).eps)

    def _sum(self, call: Callable[..., Any], divisor: Any, given: tuple[Any, ...]) -> float:
        own = _isolated_copy(call)
        if self._divides:
            return float(_with_fixed_seed(functools.partial(own, num_items_in_batch=divisor), given) * divisor)
        return float(_with_fixed_seed(own, given))

    def _reason(self, mean: float, total: float, number: float, tolerance: float) -> str:
        if self._divides:
            return "it takes num_items_in_batch, but its result is not a sum divided by it"
        if abs(mean - total) <= tolerance * abs(total):
            return 'it returns the same with reduction "sum" as with "mean"'
        return f"its mean over the batch divides by {total / mean:.6g}, and the batch has {number:g} targets"


class PairCheck:
    """Refuses a loss that broadcasts logits and labels against each other, and so pairs each logit with every label.

    A user's function passes if logits in the labels' shape give the same result. It also passes if the sum over a batch
    equals the sum over two parts of the batch: with broadcasting, a batch of N rows has N * N pairs.

    Args:
        is_elementwise: True if the loss is an elementwise loss of torch, which needs logits and labels of the same
            shape.
    """

    def __init__(self, *, is_elementwise: bool) -> None:
        self._is_elementwise = is_elementwise
        self._is_judged = False

    def __call__(self, call: Callable[..., Any], given: tuple[Any, ...]) -> None:
        """Checks what the loss does with logits and labels of different shapes.

        Args:
            call: the summing form of the loss.
            given: a tuple of the logits and the labels.

        Raises:
            TrainingError: FG869 if the loss pairs each logit with every label.

        Shapes:
            logits and labels: N rows each; without axes of size one, the shapes are equal.
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
        own = _isolated_copy(call)
        found = _with_fixed_seed(own, given)
        paired = _result_or_none(own, (logits.reshape(labels.shape), labels))
        first, rest = (_result_or_none(own, (logits[rows], labels[rows])) for rows in (slice(1), slice(1, None)))
        # A function that fails for both inputs cannot be judged.
        others = [paired, None if first is None or rest is None else first + rest]
        known = [other for other in others if other is not None]
        if known and not any(torch.allclose(found, other, rtol=_TOLERANCE, equal_nan=True) for other in known):
            raise _broadcast(logits, labels)


def _result_or_none(loss_fn: Callable[..., Any], given: tuple[Any, ...]) -> Tensor | None:
    try:
        return _with_fixed_seed(loss_fn, given)
    except Exception:  # noqa: BLE001 - code of the user that rejects these inputs; training does not pass them
        return None


def _broadcast(logits: Tensor, labels: Tensor) -> TrainingError:
    return TrainingError(
        f"the loss compares logits of shape {tuple(logits.shape)} with labels of shape {tuple(labels.shape)}: torch "
        "broadcasts both, and pairs numbers that do not belong together",
        code="FG869",
        hint="give both the same shape: end the model with .squeeze(-1), or keep the axis of size one in the labels",
    ).about("loss_fn")


def _with_fixed_seed(loss_fn: Callable[..., Any], given: tuple[Any, ...]) -> Tensor:
    """Returns the loss, computed with a fixed seed and without gradients; the random state is not changed."""
    with torch.no_grad(), seeded_random(0):
        loss: Tensor = loss_fn(*given)
        return loss if loss.ndim == 0 else loss.sum()


def _isolated_copy(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of a module, so that a check does not change the state of the module that trains."""
    holds_module = isinstance(call, nn.Module) or isinstance(getattr(call, "func", None), nn.Module)
    return copy.deepcopy(call) if holds_module else call
