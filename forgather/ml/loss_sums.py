"""The summing form of a loss that was written as a mean.

Takes a loss of torch.nn, of torch.nn.functional, or of the user; gives a callable that sums, and what the mean divided
by. Keeps true: the settings of the object that was given are not changed; a loss whose divisor cannot be known is
refused; the tensors that a loss holds go where the logits are, as a model's buffers do.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgather.errors import TrainingError

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
