"""The loss of an update: a sum over valid targets, divided by their number over all micro-batches.

Takes a model, perhaps the user's loss, and micro-batches. Gives a `LossRule`: how many targets of a
batch count, and the sum of their losses. Keeps true: sums of micro-batches can be added without
reweighting, so the result depends neither on the batch size nor on accumulation.

Which rule applies, in this order:

1. A `loss_fn` of the user gets (logits, labels). For causal language models labels are shifted (the logits
   of a position meet the label of the next) and both are flattened. A loss that takes means is turned into its
   sum on a copy; one that cannot be turned is refused.
2. A causal language model of transformers: token cross entropy in float32 of logits and shifted labels. The
   auxiliary loss of a mixture of experts is added, weighted by the targets of its micro-batch.
3. Any other model returns its own loss (first item of a tuple, "loss" of a mapping, `.loss`, or a
   scalar tensor), which is taken as the mean over the valid targets of its micro-batch.

Labels are shifted once, by `prepared`, before a batch meets the strategy: the batch then holds "shift_labels", as
transformers calls them, in place of "labels", and no logits are copied to leave a position out. Half precision is
raised to float32 for the loss; float64 is kept.

Letters of shapes: B rows, T positions, V vocabulary, N flattened positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgather.errors import TrainingError
from forgather.ml.loss_reduction import (
    DivisorCheck,
    PairCheck,
    as_sum,
    is_cross_entropy,
    no_labels,
    placed,
    setting_of,
    takes_labels,
    unknown_reduction,
)
from forgather.ml.model_inputs import SHIFTED, ModelInputs, inputs_of
from forgather.ml.types import PaddingBatch

IGNORE_INDEX = -100


class LossRule(Protocol):
    """How many targets of a batch count, and the sum of their losses.

    `ignore_index` is the label that does not count; None where no label can be ignored.
    """

    ignore_index: int | None

    def prepared(self, batch: Any) -> Any:
        """Returns the batch as a strategy gets it: labels are shifted where the model needs that."""
        ...

    def count(self, batch: Any) -> float | Tensor:
        """Returns the number of valid targets; a number on the host where the batch lies there."""
        ...

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the sum of the losses of the valid targets, in float32 or more.

        Args:
            model: called with the inputs; whoever has the outputs already gives a callable that returns them.
            batch: one micro-batch, prepared or as the collator gave it.
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
        raise smoothing_without_token_loss(label_smoothing)
    if loss_fn is not None:
        return UserLoss(model, loss_fn)
    if causal:
        return CausalTokenLoss(model, label_smoothing=label_smoothing)
    return ModelLoss(model)


def smoothing_without_token_loss(label_smoothing: float) -> TrainingError:
    """Returns the error for label smoothing that no loss would apply."""
    return TrainingError(
        f"label_smoothing_factor is {label_smoothing}, but the token loss of a causal language model is not used",
        code="FG807",
        hint="set label_smoothing on the loss_fn itself, or remove label_smoothing_factor",
    ).about("args.label_smoothing_factor")


# transformers tells the kind of a loss by the name of the class; of these it says nothing, and takes the usual one.
_CAUSAL_BY_NAME = {"BertGenerationDecoder", "BertLMHeadModel", "CTRLLMHeadModel", "GPT2LMHeadModel"}
_CAUSAL_BY_NAME |= {"OpenAIGPTLMHeadModel", "ReformerModelWithLMHead"}


def is_causal_lm(model: nn.Module) -> bool:
    """Tells whether logits of a position predict the label of the next one (transformers' `loss_type`)."""
    kind = getattr(model, "loss_type", None)
    if kind is None and hasattr(model, "loss_function"):
        return any(part.__name__ in _CAUSAL_BY_NAME for part in type(model).__mro__)
    return bool(kind == "ForCausalLM")


def labels_of(batch: Any) -> Tensor | None:
    """Returns the labels of a batch: "labels", "label", or the last item of a tuple."""
    if isinstance(batch, Mapping):
        found = batch.get("labels", batch.get("label"))
        return found if isinstance(found, Tensor) else None
    if isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[-1], Tensor):
        return batch[-1]
    return None


def shifted(labels_BT: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Returns the label that each position predicts: that of the next one, and none at the end of a row."""
    return F.pad(labels_BT[..., 1:], (0, 1), value=ignore_index)


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch that count: the length of its first tensor."""
    if isinstance(batch, PaddingBatch):
        return 0
    tensor = _first_tensor(batch)
    return 1 if tensor is None or tensor.ndim == 0 else int(tensor.shape[0])


def num_tokens(batch: Any) -> int:
    """Returns the number of input tokens of a batch; of rows, where inputs are no token ids."""
    if isinstance(batch, PaddingBatch):
        return 0
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
    return count_items(labels, ignore_index=ignore_index)


def count_items(labels: Tensor, *, ignore_index: int = IGNORE_INDEX) -> int | Tensor:
    """Returns the number of labels that are not ignored, as transformers counts items: each number of a regression."""
    valid = (labels != ignore_index).sum()
    return int(valid) if valid.device.type == "cpu" else valid


def at_least_float32(values: Tensor) -> Tensor:
    """Returns half precision as float32, and anything else as it is."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def flat_logits(logits_BTV: Tensor) -> Tensor:
    """Returns (B, T, V) as (N, V), with N = B * T; nothing is copied."""
    return logits_BTV.reshape(-1, logits_BTV.shape[-1])


class _Sums:
    """What the rules have in common: a batch that counts for nothing, and labels that are shifted or not.

    Args:
        model: the model that will be called, or the one that something is wrapped around.
    """

    ignore_index: int | None = IGNORE_INDEX
    shifts = False
    is_token_entropy = False
    """True where the mean is the cross entropy of next tokens in nats, whose exp is a perplexity."""

    def __init__(self, model: nn.Module) -> None:
        self._inputs = ModelInputs(model)

    def prepared(self, batch: Any) -> Any:
        """Returns the batch as a strategy gets it: labels are shifted where the model needs that."""
        if isinstance(batch, PaddingBatch):
            return PaddingBatch(self.prepared(batch.batch))
        if not self.shifts or not isinstance(batch, Mapping) or SHIFTED in batch:
            return self._inputs.prepared(batch)
        targets = self._targets(batch)
        return self._inputs.prepared(batch if targets is None else {**inputs_of(batch), SHIFTED: targets})

    def count(self, batch: Any) -> float | Tensor:
        """Returns the number of valid targets; a number on the host where the batch lies there."""
        return 0 if isinstance(batch, PaddingBatch) else self._count(batch)

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the sum of the losses of the valid targets, in float32 or more."""
        if isinstance(batch, PaddingBatch):
            return self.total(model, batch.batch, denom=denom) * 0.0
        return self._total(model, self._inputs.prepared(batch), denom)

    def _targets(self, batch: Any) -> Tensor | None:
        if isinstance(batch, Mapping) and isinstance(found := batch.get(SHIFTED), Tensor):
            return found
        labels = labels_of(batch)
        if labels is None or not self.shifts:
            return labels
        return shifted(labels, IGNORE_INDEX if self.ignore_index is None else self.ignore_index)

    def _count(self, batch: Any) -> float | Tensor:
        raise NotImplementedError

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        raise NotImplementedError


class CausalTokenLoss(_Sums):
    """Token cross entropy of a causal language model, from its logits."""

    shifts = True

    def __init__(self, model: nn.Module, *, label_smoothing: float = 0.0) -> None:
        super().__init__(model)
        self.label_smoothing = label_smoothing
        self.is_token_entropy = not label_smoothing
        config = getattr(model, "config", None)
        self._aux_weight = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)

    def _needed_targets(self, batch: Any) -> Tensor:
        targets = self._targets(batch)
        if targets is None:
            raise no_labels(batch)
        return targets

    def _count(self, batch: Any) -> float | Tensor:
        return count_valid(self._needed_targets(batch), batch)

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        targets_BT = self._needed_targets(batch)
        output = self._inputs.call(model, batch)
        total = F.cross_entropy(
            at_least_float32(flat_logits(logits_of(output))),
            targets_BT.reshape(-1),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        auxiliary = getattr(output, "aux_loss", None)
        if auxiliary is not None and torch.is_grad_enabled():
            total = total + self._aux_weight * at_least_float32(auxiliary) * count_valid(targets_BT, batch)
        return total


class ModelLoss(_Sums):
    """The loss that the model returns, taken as a mean over its valid targets."""

    def _count(self, batch: Any) -> float | Tensor:
        return count_valid(labels_of(batch), batch)

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        targets = self.count(batch)
        mean = at_least_float32(_returned_loss(self._inputs.call(model, batch, labels=True)))
        if not isinstance(targets, Tensor) and targets:
            return mean * targets
        # The mean over no targets is no number, and zero times that is none either.
        some = targets > 0 if isinstance(targets, Tensor) else torch.zeros_like(mean, dtype=torch.bool)
        return torch.where(some, mean * targets, torch.zeros_like(mean))


class UserLoss(_Sums):
    """The user's loss of (logits, labels), summed.

    Args:
        model: the model that gives the logits; for a causal language model labels are shifted, and both flattened.
        loss_fn: a module of torch.nn, or a function with a parameter `reduction` or `num_items_in_batch`.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__(model)
        self.shifts = is_causal_lm(model)
        self.call, self.divides, self.unit = as_sum(loss_fn)
        self._check = DivisorCheck(loss_fn, divides=self.divides)
        self._needs_labels = takes_labels(loss_fn)
        self._pairs = PairCheck(is_elementwise=self.unit == "elements")
        self._device: torch.device | None = None
        self.weight = setting_of(loss_fn, "weight", None) if self.unit == "classes" else None
        if not isinstance(self.weight, Tensor | None):
            raise unknown_reduction(loss_fn, f"its weight is a {type(self.weight).__name__} and no tensor")
        self._ignored = int(setting_of(loss_fn, "ignore_index", IGNORE_INDEX))
        self.is_token_entropy = self.shifts and self.weight is None and is_cross_entropy(loss_fn)
        self.ignore_index = None if self.unit == "elements" else self._ignored

    def _count(self, batch: Any) -> float | Tensor:
        """Returns what the mean of this loss divides by: targets, their class weights, or elements."""
        labels = self._targets(batch)
        if labels is None:
            return num_rows(batch)
        if self.divides:
            return count_items(labels, ignore_index=self._ignored)
        if self.unit == "elements":
            return labels.numel()
        if self.unit == "classes" and labels.is_floating_point():  # class probabilities: one target a position
            return labels.numel() // (labels.shape[1] if labels.ndim > 1 else labels.shape[0])
        if self.weight is None:
            return count_valid(labels, batch, ignore_index=self._ignored)
        total = self.weight.to(labels.device)[labels[labels != self._ignored]].sum()
        return float(total) if total.device.type == "cpu" else total

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        labels = self._targets(batch)
        if labels is None and self._needs_labels:
            raise no_labels(batch, "a loss_fn gets the logits and the labels: call the column of targets 'labels'")
        logits = logits_of(self._inputs.call(model, batch))
        if self.shifts and labels is not None:
            logits, labels = flat_logits(logits), labels.reshape(-1)
            if self.unit != "classes":
                # Nothing says that a function of the user leaves labels out that are ignored: it meets only real ones.
                real = labels != self._ignored
                logits, labels = logits[real], labels[real]
        logits = at_least_float32(logits) if logits.is_floating_point() else logits
        if logits.device != self._device:
            self.call, self._device = placed(self.call, logits.device), logits.device
        given = (logits,) if labels is None else (logits, labels)
        if labels is not None and logits.shape != labels.shape:
            self._pairs(functools.partial(self.call, num_items_in_batch=1) if self.divides else self.call, given)
        if not self.divides:
            loss: Tensor = self.call(*given)
            total = at_least_float32(loss if loss.ndim == 0 else loss.sum())
            self._check(self.call, total, lambda: self.count(batch), given)
            return total
        divisor = self.count(batch) if denom is None else denom
        total = at_least_float32(self.call(*given, num_items_in_batch=divisor)) * divisor
        self._check(self.call, total, lambda: divisor, given)
        return total


def logits_of(output: Any) -> Tensor:
    """Returns the logits of what a model returned: a tensor, first of a tuple, or "logits".

    Raises:
        TrainingError: FG809 for an output without logits.
    """
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
    ).about("model")


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
    ).about("model")


def _shape_of(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return "a mapping with " + (", ".join(repr(str(name)) for name in output) or "nothing")
    return f"a {type(output).__name__}"
