"""The loss of an update: a sum over valid targets, divided by their number over all micro-batches.

Takes a model, perhaps the user's loss, and micro-batches. Gives a `LossRule`: how many targets of a
batch count, and the sum of their losses. Keeps true: sums of micro-batches can be added without
reweighting, so the result depends neither on the batch size nor on accumulation.

Which rule applies, in this order:

1. A `loss_fn` of the user gets (logits, labels). For causal language models both are shifted (the logits
   of a position meet the label of the next) and flattened. A loss that takes means is turned into its
   sum on a copy; one that cannot be turned is refused.
2. A causal language model of transformers: token cross entropy in float32 of the shifted logits. The
   auxiliary loss of a mixture of experts is added, weighted by the targets of its micro-batch.
3. Any other model returns its own loss (first item of a tuple, "loss" of a mapping, `.loss`, or a
   scalar tensor), which is taken as the mean over the valid targets of its micro-batch.

Letters of shapes: B rows, T positions, V vocabulary, N flattened positions.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgather.errors import TrainingError

IGNORE_INDEX = -100


class LossRule(Protocol):
    """How many targets of a batch count, and the sum of their losses."""

    def count(self, batch: Any) -> float | Tensor:
        """Returns the number of valid targets; a number on the host where the batch lies there."""
        ...

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the sum of the losses of the valid targets, in float32.

        Args:
            model: called with the inputs; whoever has the outputs already gives a callable that returns them.
            batch: one micro-batch.
            denom: what the sum will be divided by; that of the batch by default.
        """
        ...


def loss_rule(model: nn.Module, loss_fn: Callable[..., Any] | None = None, *, label_smoothing: float = 0.0) -> LossRule:
    """Returns the rule that applies to `model`.

    Args:
        model: the model as it will be trained.
        loss_fn: the user's loss, called with (logits, labels).
        label_smoothing: of the token loss of causal language models.

    Raises:
        TrainingError: FG806 for a loss whose sum cannot be known, FG807 for label smoothing without a
            token loss of ours.
    """
    causal = is_causal_lm(model)
    if label_smoothing and (loss_fn is not None or not causal):
        raise TrainingError(
            f"label_smoothing_factor is {label_smoothing}, but the token loss of a causal language model is not used",
            code="FG807",
            hint="set label_smoothing on the loss_fn itself, or remove label_smoothing_factor",
        )
    if loss_fn is not None:
        return UserLoss(loss_fn, causal=causal)
    if causal:
        return CausalTokenLoss(model, label_smoothing=label_smoothing)
    return ModelLoss()


def is_causal_lm(model: nn.Module) -> bool:
    """Tells whether logits of a position predict the label of the next one (transformers' `loss_type`)."""
    return getattr(model, "loss_type", None) == "ForCausalLM"


def labels_of(batch: Any) -> Tensor | None:
    """Returns the labels of a batch: "labels", "label", or the last item of a tuple."""
    if isinstance(batch, Mapping):
        found = batch.get("labels", batch.get("label"))
        return found if isinstance(found, Tensor) else None
    if isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[-1], Tensor):
        return batch[-1]
    return None


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch: the length of its first tensor."""
    tensor = _first_tensor(batch)
    return 1 if tensor is None or tensor.ndim == 0 else int(tensor.shape[0])


def num_tokens(batch: Any) -> int:
    """Returns the number of input tokens of a batch; of rows, where inputs are no token ids."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return int(batch["input_ids"].numel())
    tensor = _first_tensor(batch)
    if tensor is None or tensor.is_floating_point():
        return num_rows(batch)
    return int(tensor.numel())


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    items = batch.values() if isinstance(batch, Mapping) else batch
    return next((item for item in items if isinstance(item, Tensor)), None)


def count_valid(labels: Tensor | None, batch: Any, *, ignore_index: int = IGNORE_INDEX) -> float | Tensor:
    """Returns the number of targets: labels that are not ignored, or rows where there are no such labels."""
    if labels is None:
        return num_rows(batch)
    if labels.is_floating_point():
        return int(labels.shape[0]) if labels.ndim else 1
    valid = (labels != ignore_index).sum()
    return int(valid) if valid.device.type == "cpu" else valid


def call_model(model: Callable[..., Any], batch: Any, **extra: Any) -> Any:
    """Calls the model with a batch: keywords of a mapping, positions of a tuple, or one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch, **extra)
    if isinstance(batch, tuple | list):
        return model(*batch, **extra)
    return model(batch, **extra)


def shifted_logits(logits_BTV: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits and the labels they predict, flattened.

    Shapes:
        (B, T, V) and (B, T) become (N, V) and (N,) with N = B * (T - 1).
    """
    logits_NV = logits_BTV[..., :-1, :].reshape(-1, logits_BTV.shape[-1])
    return logits_NV, labels_BT[..., 1:].reshape(-1)


class CausalTokenLoss:
    """Token cross entropy of a causal language model, from its logits."""

    def __init__(self, model: nn.Module, *, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing
        self._extra = {"use_cache": False} if _accepts(model.forward, "use_cache") else {}
        config = getattr(model, "config", None)
        self._aux_weight = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)

    def count(self, batch: Any) -> float | Tensor:
        """Returns the number of labels that are predicted and not ignored."""
        return count_valid(_needed_labels(batch)[..., 1:], batch)

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the sum of the token losses, in float32."""
        labels = _needed_labels(batch)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        output = call_model(model, inputs, **self._extra)
        logits_NV, labels_N = shifted_logits(_logits(output), labels)
        total = F.cross_entropy(
            logits_NV.float(),
            labels_N,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        auxiliary = getattr(output, "aux_loss", None)
        if auxiliary is not None and torch.is_grad_enabled():
            total = total + self._aux_weight * auxiliary.float() * count_valid(labels[..., 1:], batch)
        return total


class ModelLoss:
    """The loss that the model returns, taken as a mean over its valid targets."""

    def count(self, batch: Any) -> float | Tensor:
        """Returns the number of labels that are not ignored, or of rows."""
        return count_valid(labels_of(batch), batch)

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the model's mean times the number of targets, in float32."""
        targets = self.count(batch)
        mean = _returned_loss(call_model(model, batch)).float()
        if isinstance(targets, Tensor):
            return torch.where(targets > 0, mean * targets, torch.zeros_like(mean))
        return mean * targets if targets else mean * 0.0


class UserLoss:
    """The user's loss of (logits, labels), summed.

    Args:
        loss_fn: a module of torch.nn, or a function with a parameter `reduction` or `num_items_in_batch`.
        causal: shift and flatten, as causal language models need it.
    """

    def __init__(self, loss_fn: Callable[..., Any], *, causal: bool) -> None:
        self.causal = causal
        self.call, self.divides, self.unit = _as_sum(loss_fn)
        self.weight = _setting_of(loss_fn, "weight", None) if self.unit == "classes" else None
        if not isinstance(self.weight, Tensor | None):
            raise _unknown_reduction(loss_fn, f"its weight is a {type(self.weight).__name__} and no tensor")
        self.ignore_index = int(_setting_of(loss_fn, "ignore_index", IGNORE_INDEX))

    def count(self, batch: Any) -> float | Tensor:
        """Returns what the mean of this loss divides by: targets, their class weights, or elements."""
        labels = labels_of(batch)
        if labels is None:
            return num_rows(batch)
        if self.unit == "elements":
            return labels.numel()
        if self.unit == "classes" and labels.is_floating_point():  # class probabilities: one target a position
            return labels.numel() // (labels.shape[1] if labels.ndim > 1 else labels.shape[0])
        if self.causal:
            labels = labels[..., 1:]
        if self.weight is None:
            return count_valid(labels, batch, ignore_index=self.ignore_index)
        total = self.weight.to(labels.device)[labels[labels != self.ignore_index]].sum()
        return float(total) if total.device.type == "cpu" else total

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the sum of this loss, in float32."""
        labels = labels_of(batch)
        output = call_model(model, _without_labels(batch))
        logits = _logits(output)
        if self.causal and labels is not None:
            logits, labels = shifted_logits(logits, labels)
        logits = logits.float() if logits.is_floating_point() else logits
        targets = () if labels is None else (labels,)
        if not self.divides:
            loss: Tensor = self.call(logits, *targets)
            return (loss if loss.ndim == 0 else loss.sum()).float()
        divisor = self.count(batch) if denom is None else denom
        share: Tensor = self.call(logits, *targets, num_items_in_batch=divisor)
        return share.float() * divisor


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


def _as_sum(loss_fn: Callable[..., Any]) -> tuple[Callable[..., Any], bool, str]:
    """Returns the summing form of a loss, whether it divides by itself, and what its mean counts."""
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        if isinstance(loss_fn, _PER_TARGET):
            return _summing_copy(loss_fn), False, "classes"
        if isinstance(loss_fn, _PER_ELEMENT):
            return _summing_copy(loss_fn), False, "elements"
        if loss_fn.reduction in ("sum", "none"):
            return loss_fn, False, "targets"
        raise _unknown_reduction(loss_fn, f"it reduces by {loss_fn.reduction!r} over a number that cannot be known")
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if _accepts(function, "num_items_in_batch"):
        return loss_fn, True, "targets"
    if _accepts(function, "reduction"):
        root = _layers(function)[-1]
        if root not in _UNIT_OF_FUNCTION and getattr(F, getattr(root, "__name__", ""), None) is root:
            raise _unknown_reduction(loss_fn, "the number that its mean divides by cannot be known")
        return functools.partial(loss_fn, reduction="sum"), False, _UNIT_OF_FUNCTION.get(root, "targets")
    raise _unknown_reduction(loss_fn, "nothing says whether it returns a sum or a mean, and of what")


def _layers(function: Any) -> list[Any]:
    """Returns a partial, what it calls, what that calls, ...; any other callable alone."""
    layers = [function]
    while (inner := getattr(layers[-1], "func", None)) is not None and hasattr(layers[-1], "keywords"):
        layers.append(inner)
    return layers


def _setting_of(loss_fn: Callable[..., Any], name: str, default: Any) -> Any:
    """Returns a setting of a loss: the outermost partial's keyword, or an attribute of the module."""
    for layer in _layers(loss_fn):
        found = (getattr(layer, "keywords", None) or {}).get(name, getattr(layer, name, None))
        if found is not None:
            return found
    return default


def _summing_copy(loss_fn: nn.Module) -> nn.Module:
    summing = copy.deepcopy(loss_fn)
    setattr(summing, "reduction", "sum")  # noqa: B010 - torch types attributes of modules as tensors
    return summing


def _unknown_reduction(loss_fn: Any, reason: str) -> TrainingError:
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return TrainingError(
        f"loss_fn {name!r} cannot be summed over micro-batches: {reason}",
        code="FG806",
        hint="give it a parameter 'reduction' that understands \"sum\", or 'num_items_in_batch' to divide by",
    )


def _accepts(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _needed_labels(batch: Any) -> Tensor:
    labels = labels_of(batch)
    if labels is None:
        keys = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise TrainingError(
            f"the batch has no labels (found: {keys})",
            code="FG808",
            hint="a causal language model needs 'labels': use DataCollatorForLanguageModeling(mlm=False), "
            "or a data set with a column 'labels'",
        )
    return labels


def _without_labels(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name not in ("labels", "label")}
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return tuple(batch[:-1])
    return batch


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if isinstance(found, Tensor):
        return found
    raise TrainingError(
        f"the model returned {_shape_of(output)}, and no logits",
        code="FG809",
        hint="return a tensor, a tuple with the logits first, or a mapping with 'logits'",
    )


def _returned_loss(output: Any) -> Tensor:
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.reshape(())
    raise TrainingError(
        f"the model returned {_shape_of(output)}, and no loss",
        code="FG809",
        hint="give the trainer a loss_fn, or return the loss as a scalar, as 'loss', or first in a tuple",
    )


def _shape_of(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return "a mapping with " + (", ".join(repr(str(name)) for name in output) or "nothing")
    return f"a {type(output).__name__}"
