"""The loss of an optimizer step: a sum over valid targets, divided by their number over all micro-batches and ranks.

`loss_rule` takes a model and optionally the user's loss, and returns a `LossRule`, which computes the number of valid
targets in a batch and the sum of their losses. The sums of micro-batches can be added without weights, so the result
depends neither on the batch size nor on gradient accumulation.

The first of these rules that applies is used:

0. A loss object that has a method `loss_rule` makes its rule itself, as those of `ml.preference_losses` do.
1. If the user gives a `loss_fn`, it is called with (logits, labels). For causal language models, labels are shifted
   (the logits of a position predict the label of the next position) and both arguments are flattened. If the loss
   returns a mean, a copy of it is converted to return a sum. A loss that cannot be converted is refused.
2. For a causal language model of transformers, the loss is the token cross entropy of float32 logits and shifted
   labels. The auxiliary loss of a mixture of experts is added, weighted by the number of targets in its micro-batch.
3. Any other model computes its own loss, which is the first item of a tuple, the entry "loss" of a mapping, the
   attribute `.loss`, or a scalar tensor. The returned loss is taken as the mean over the micro-batch's valid targets.

The method `prepared` shifts labels once, before a batch reaches the strategy. The batch then has the entry
"shift_labels", as transformers calls it, in place of "labels", so that no copy of the logits without the last position
is needed. Losses of half-precision logits are computed in float32; those of float64 logits are computed in float64.

Shapes:
    B rows, T positions, V vocabulary, N flattened positions.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forgather.errors import TrainingError
from forgather.ml.activation_offloading import saved_on_device
from forgather.ml.batch_sizes import num_rows
from forgather.ml.label_kind import LabelKind, kind_of_labels
from forgather.ml.loss_kernels import SETTING
from forgather.ml.loss_path import LOGITS, LossPath, PathSettings
from forgather.ml.loss_reduction import (
    DivisorCheck,
    PairCheck,
    as_sum,
    is_cross_entropy,
    no_labels,
    on_device,
    setting_of,
    takes_labels,
    unknown_reduction,
)
from forgather.ml.loss_terms import LossTerms, z_loss_of
from forgather.ml.model_class import class_name
from forgather.ml.model_inputs import SHIFTED, ModelInputs, inputs_of
from forgather.ml.types import MAPPINGS, PaddingBatch

IGNORE_INDEX = -100
_DECODER_INPUTS = frozenset({"decoder_input_ids", "decoder_inputs_embeds"})


class LossRule(Protocol):
    """The loss of a batch as a sum, and the number of targets by which the sum is divided to get the mean.

    The attribute `ignore_index` is the label of positions that do not contribute to the loss. None if no label is
    ignored.
    """

    ignore_index: int | None

    def prepared(self, batch: Any) -> Any:
        """Returns the batch for a strategy, with shifted labels if the model needs them."""
        ...

    def count(self, batch: Any) -> float | Tensor:
        """Returns the number of valid targets in a batch, as a Python number if the batch is on the host.

        Shapes:
            Returns a Python number or a scalar tensor.
        """
        ...

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the sum of the losses of the valid targets, in float32 or float64.

        Args:
            model: the model, which is called with the inputs. A caller that already has the outputs passes a callable
                that returns them.
            batch: one micro-batch, as the collator returned it or as `prepared` returned it.
            denom: the number by which the caller will divide the sum. None for the number of valid targets in the
                batch.

        Shapes:
            Returns a scalar tensor.
        """
        ...

    def total_and_output(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, Any]:
        """Returns the sum of the losses of the valid targets, and the output of the model without the loss.

        Shapes:
            Returns a scalar tensor, and the model's output.
        """
        ...

    def output(self, model: Callable[..., Any], batch: Any) -> Any:
        """Returns the output of the model for a batch that may have no labels.

        Shapes:
            Returns the model's output.
        """
        ...


class RuleMaker(Protocol):
    """A loss object that makes the rule itself which applies it to batches, such as `DPOLoss`."""

    def loss_rule(self, model: nn.Module) -> LossRule:
        """Returns the rule for a model."""
        ...


Loss = Callable[..., Any] | RuleMaker
"""What a trainer takes as `loss_fn`: a function of (logits, labels), or an object that makes its rule."""


def loss_rule(
    model: nn.Module,
    loss_fn: Loss | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    path: PathSettings = LOGITS,
) -> LossRule:
    """Returns the loss rule of a model, which determines how labels are shifted and which label value is ignored.

    Args:
        model: the model that will be trained.
        loss_fn: the user's loss, which is called with (logits, labels). None for the token loss of causal language
            models, or the loss that another model returns. An object with a method `loss_rule` makes the rule itself.
        label_smoothing: the label smoothing in the token loss of causal language models.
        z_loss: the coefficient of the z-loss in the token loss of causal language models.
        path: whether the token loss of causal language models is computed without logits.

    Raises:
        TrainingError: FG801 if the model has no `forward`, or is a LightningModule; FG716 if a loss without logits is
            required and the token loss is not used; FG717 or FG718 if its kernel cannot be used; FG806 if the loss
            cannot be converted to a sum; FG807 if label smoothing or a z-loss is given and the token loss is not used.
    """
    _refuse_without_forward(model)
    causal = is_causal_lm(model)
    if loss_fn is not None or not causal:
        if label_smoothing:
            raise smoothing_without_token_loss(label_smoothing)
        if z_loss:
            raise _without_token_loss("z_loss_coefficient", z_loss, "FG807", "remove z_loss_coefficient")
        if path.kernel not in ("auto", False):
            raise _without_token_loss(SETTING, path.kernel, "FG716", f"remove {SETTING}")
    if loss_fn is not None and hasattr(loss_fn, "loss_rule"):
        return loss_fn.loss_rule(model)
    if loss_fn is not None:
        return UserLoss(model, loss_fn)
    if causal:
        return CausalTokenLoss(model, label_smoothing=label_smoothing, z_loss=z_loss, path=path)
    return ModelLoss(model)


def _refuse_without_forward(model: nn.Module) -> None:
    """Raises an error if the loss of a model is not computed by its `forward`."""
    kind = type(model)
    # Of Forgather or of Lightning, whose optimizers and hooks would not be called either.
    if all(callable(getattr(model, name, None)) for name in ("training_step", "configure_optimizers")):
        raise TrainingError(
            f"{kind.__name__} is a LightningModule, and this trainer would call its forward instead of training_step",
            code="FG801",
            hint="extend 'trainers/lightning.yaml'; in a script: forgather.lightning.Trainer(...).fit(model)",
        ).about("model")
    # An object may have a method of its own, as modules have that torch.compile wraps.
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        raise TrainingError(
            f"{kind.__name__} has no method forward",
            code="FG801",
            hint="write forward(self, **batch), which returns the loss, or logits for a loss_fn",
        ).about("model")


def _without_token_loss(setting: str, value: Any, code: str, hint: str) -> TrainingError:
    return TrainingError(
        f"{setting} is {value}, but the token loss of a causal language model is not used", code=code, hint=hint
    ).about(f"args.{setting}")


def smoothing_without_token_loss(label_smoothing: float) -> TrainingError:
    """Returns the FG807 error, for label smoothing that the loss in use would not apply.

    Args:
        label_smoothing: the value in the settings.
    """
    return TrainingError(
        f"label_smoothing_factor is {label_smoothing}, but the token loss of a causal language model is not used",
        code="FG807",
        hint="set label_smoothing on the loss_fn itself, or remove label_smoothing_factor",
    ).about("args.label_smoothing_factor")


# transformers derives `loss_type` from the class name. For these it finds none, and uses the causal loss.
_CAUSAL_BY_NAME = {"BertGenerationDecoder", "BertLMHeadModel", "CTRLLMHeadModel", "GPT2LMHeadModel"}
_CAUSAL_BY_NAME |= {"OpenAIGPTLMHeadModel", "ReformerModelWithLMHead"}


def is_causal_lm(model: nn.Module) -> bool:
    """Returns whether the logits of a position predict the label of the next token (transformers' `loss_type`)."""
    kind = getattr(model, "loss_type", None)
    if kind is None and hasattr(model, "loss_function"):
        # The wrapper of peft has the attributes of the model inside it, and another class.
        inner = getattr(model, "get_base_model", None)
        return any(part.__name__ in _CAUSAL_BY_NAME for part in type(inner() if callable(inner) else model).__mro__)
    return bool(kind == "ForCausalLM")


def labels_of(batch: Any) -> Tensor | None:
    """Returns the labels in a batch, or None if it has none.

    The labels are the entry "labels" or "label" of a mapping, or the last item of a tuple.

    Shapes:
        Returns (B, T) for tokens, (B,) or (B, ...) for other targets.
    """
    if isinstance(batch, MAPPINGS):
        found = batch.get("labels", batch.get("label"))
        return found if isinstance(found, Tensor) else None
    if isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[-1], Tensor):
        return batch[-1]
    return None


def shifted_labels(labels_BT: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Returns, for each position, the label of the next position; the last position of a row gets `ignore_index`.

    Args:
        labels_BT: the label of each token.
        ignore_index: the label of positions that do not contribute to the loss.

    Shapes:
        labels_BT: (B, T). Returns (B, T).
    """
    # Padded instead of cut: logits without the last position would be a copy of the largest tensor of a step.
    return F.pad(labels_BT[..., 1:], (0, 1), value=ignore_index)


def count_valid(labels: Tensor | None, batch: Any, *, ignore_index: int = IGNORE_INDEX) -> float | Tensor:
    """Returns the number of labels that are not ignored, or the number of rows if there are no integer labels.

    Args:
        labels: the labels of the batch. None if the batch has no labels.
        batch: the batch whose rows are counted if there are no labels.
        ignore_index: the label of positions that do not contribute to the loss.

    Shapes:
        labels: (B, T) or any other shape. Returns a Python number or a scalar tensor.
    """
    if labels is None:
        return num_rows(batch)
    if labels.is_floating_point():
        return int(labels.shape[0]) if labels.ndim else 1
    return count_items(labels, ignore_index=ignore_index)


def count_items(labels: Tensor, *, ignore_index: int = IGNORE_INDEX) -> int | Tensor:
    """Returns the number of labels that are not ignored; for a regression, the number of elements, as in transformers.

    Args:
        labels: the labels of the batch.
        ignore_index: the label of positions that do not contribute to the loss.

    Shapes:
        labels: any shape. Returns a Python number or a scalar tensor.
    """
    valid = (labels != ignore_index).sum()
    return int(valid) if valid.device.type == "cpu" else valid  # on a device, `int` would wait for it


def at_least_float32(values: Tensor) -> Tensor:
    """Returns a float16 or bfloat16 tensor as float32, and a tensor of any other dtype unchanged.

    Shapes:
        values: any shape. Returns the same shape.
    """
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def flat_logits(logits_BTV: Tensor) -> Tensor:
    """Returns logits with rows and positions flattened into one dimension, without a copy.

    Shapes:
        logits_BTV: (B, T, V). Returns (N, V), with N = B * T.
    """
    return logits_BTV.reshape(-1, logits_BTV.shape[-1])


class BaseLossRule(ABC):
    """The base class of loss rules, which handles padding batches and shifted labels.

    Args:
        model: the model whose forward is called. It may be wrapped for distributed training later.
    """

    ignore_index: int | None = IGNORE_INDEX
    shifts = False
    is_token_entropy = False
    """True if the mean loss is a next-token cross entropy in nats, whose exponential is a perplexity."""
    label_kind: LabelKind | None = None
    """What the labels must be; None if the loss may take any."""
    path: LossPath | None = None
    """Whether the loss is computed without logits; None for rules that always compute them."""

    def __init__(self, model: nn.Module) -> None:
        self.model_name = class_name(model)
        self._inputs = ModelInputs(model)
        self._aux_weight = float(getattr(getattr(model, "config", None), "router_aux_loss_coef", 0.0) or 0.0)

    def prepared(self, batch: Any) -> Any:
        """Returns the batch for a strategy, with shifted labels if the model needs them."""
        if isinstance(batch, PaddingBatch):
            return PaddingBatch(self.prepared(batch.batch))
        if not self.shifts or not isinstance(batch, MAPPINGS) or SHIFTED in batch:
            return self._inputs.prepared(batch)
        targets = self._targets(batch)
        return self._inputs.prepared(batch if targets is None else {**inputs_of(batch), SHIFTED: targets})

    def count(self, batch: Any) -> float | Tensor:
        """Returns the number of valid targets in a batch, as a Python number if the batch is on the host."""
        return 0 if isinstance(batch, PaddingBatch) else self._count(batch)

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the sum of the losses of the valid targets, in float32 or float64; see `LossRule.total`.

        Shapes:
            Returns a scalar tensor.
        """
        if isinstance(batch, PaddingBatch):
            # Computed, not skipped: FSDP and pipelines need forward and backward of every rank. Times 0, so that
            # gradients exist and are 0.
            return self.total(model, batch.batch, denom=denom) * 0.0
        return self._total(model, self.prepared(batch), denom)

    def total_and_output(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, Any]:
        """Returns the sum of the losses of the valid targets, and the output of the model without the loss.

        Shapes:
            Returns a scalar tensor, and the model's output.
        """
        outputs: list[Any] = []

        def recording(*args: Any, **kwargs: Any) -> Any:
            outputs.append(model(*args, **kwargs))
            return outputs[-1]

        total = self.total(recording, batch)
        return total, self._without_loss(outputs[-1])

    def output(self, model: Callable[..., Any], batch: Any) -> Any:
        """Returns the output of the model for a batch that may have no labels.

        Shapes:
            Returns the model's output.
        """
        batch = batch.batch if isinstance(batch, PaddingBatch) else batch
        return self._inputs.call(model, self.prepared(batch))

    def _without_loss(self, output: Any) -> Any:
        return output

    def _with_auxiliary(self, total: Tensor, output: Any, count: Callable[[], float | Tensor]) -> Tensor:
        """Returns a sum of losses plus the auxiliary loss of a mixture of experts, which transformers adds to means.

        It is needed by rules that use the logits: transformers adds it to the loss that the model returns only.

        Args:
            total: the sum of the losses.
            output: the output of the model.
            count: a function that returns the number by which the sum will be divided. The auxiliary loss is a mean
                over the micro-batch.

        Shapes:
            total: a scalar. Returns a scalar.
        """
        auxiliary = getattr(output, "aux_loss", None)
        # It is not added in evaluation, where the loss must stay what its name says, such as a token cross entropy.
        if auxiliary is None or not torch.is_grad_enabled():
            return total
        return total + self._aux_weight * at_least_float32(auxiliary) * count()

    def _targets(self, batch: Any) -> Tensor | None:
        if isinstance(batch, MAPPINGS) and isinstance(found := batch.get(SHIFTED), Tensor):
            return found
        labels = labels_of(batch)
        if labels is None or not self.shifts:
            return labels
        return shifted_labels(labels, IGNORE_INDEX if self.ignore_index is None else self.ignore_index)

    @abstractmethod
    def _count(self, batch: Any) -> float | Tensor: ...

    @abstractmethod
    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor: ...


class CausalTokenLoss(BaseLossRule):
    """The token cross entropy of a causal language model, computed from its logits or without them.

    Args:
        model: a causal language model of transformers.
        label_smoothing: the label smoothing, as in `torch.nn.functional.cross_entropy`.
        z_loss: the coefficient of the squared logarithm of the softmax's denominator, which is added to the loss of
            each target in training.
        path: whether the loss is computed without logits.

    Raises:
        TrainingError: FG717 or FG718 if the kernel of a loss without logits cannot be used.

    Source:
        `transformers.loss.loss_utils.ForCausalLMLoss` with `num_items_in_batch`, and the auxiliary loss of MoE models.
    """

    shifts = True
    label_kind = LabelKind.NEXT_TOKEN

    def __init__(
        self, model: nn.Module, *, label_smoothing: float = 0.0, z_loss: float = 0.0, path: PathSettings = LOGITS
    ) -> None:
        super().__init__(model)
        self.label_smoothing = label_smoothing
        self._terms = LossTerms(IGNORE_INDEX, label_smoothing, z_loss)
        self.path = LossPath(model, path, self._terms)
        self.is_token_entropy = not label_smoothing

    def _needed_targets(self, batch: Any) -> Tensor:
        targets = self._targets(batch)
        if targets is None:
            raise no_labels(batch)
        return targets

    def _count(self, batch: Any) -> float | Tensor:
        return count_valid(self._needed_targets(batch), batch)

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        targets_BT = self._needed_targets(batch)
        total, output = None, None
        if self.path is not None and self.path.takes(targets_BT):
            total, output = self.path.total(lambda: self._inputs.call(model, batch), targets_BT)
        if total is None:
            output = self._inputs.call(model, batch) if output is None else output
            with saved_on_device():
                total = self._total_of_logits(at_least_float32(flat_logits(logits_of(output))), targets_BT.reshape(-1))
        return self._with_auxiliary(total, output, lambda: count_valid(targets_BT, batch))

    def _total_of_logits(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        total = F.cross_entropy(
            logits_NV,
            targets_N,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        # Not in evaluation, whose loss must stay a token cross entropy.
        if self._terms.z_loss and torch.is_grad_enabled():
            total = total + z_loss_of(logits_NV, targets_N, self._terms)
        return total


class ModelLoss(BaseLossRule):
    """The loss that the model itself returns, which is taken as the mean over its valid targets.

    Args:
        model: a model that returns a loss if it gets labels.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.label_kind = kind_of_labels(model)
        config = getattr(model, "config", None)
        writes = getattr(model, "loss_type", None) == "ForConditionalGeneration"
        # Routers add a loss of their own, whose exponential means nothing.
        self.is_token_entropy = (
            writes
            and bool(getattr(config, "is_encoder_decoder", False))
            and not getattr(config, "output_router_logits", False)
        )

    def _count(self, batch: Any) -> float | Tensor:
        return count_valid(labels_of(batch), batch)

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        targets = self.count(batch)
        mean = at_least_float32(_returned_loss(self._inputs.call(model, batch, labels=True)))
        # A tensor is not compared here, because that would wait for the device.
        if not isinstance(targets, Tensor) and targets:
            return mean * targets
        # Without targets the model's mean is NaN, and 0 * NaN is NaN too.
        some = targets > 0 if isinstance(targets, Tensor) else torch.zeros_like(mean, dtype=torch.bool)
        return torch.where(some, mean * targets, torch.zeros_like(mean))

    def _without_loss(self, output: Any) -> Any:
        return without_loss(output)


class UserLoss(BaseLossRule):
    """The user's loss of (logits, labels), converted to a sum.

    Args:
        model: the model that computes the logits. For a causal language model, labels are shifted, and logits and
            labels are flattened.
        loss_fn: a loss module of torch.nn, or a function with a parameter `reduction` or `num_items_in_batch`.

    Raises:
        TrainingError: FG806 if the loss cannot be converted to a sum.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__(model)
        self.shifts = is_causal_lm(model)
        self.call, self.divides, self.unit = as_sum(loss_fn)
        # Both checks run in the first batches only: they call the loss again.
        self._check = DivisorCheck(loss_fn, divides=self.divides)
        self._needs_labels = takes_labels(loss_fn)
        # The decoder of a classifier reads the input, and needs no labels.
        self._has_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)) and not str(
            getattr(model, "loss_type", "")
        ).endswith("Classification")
        self._pairs = PairCheck(is_elementwise=self.unit == "elements")
        self._device: torch.device | None = None
        self.weight = setting_of(loss_fn, "weight", None) if self.unit == "classes" else None
        if not isinstance(self.weight, Tensor | None):
            raise unknown_reduction(loss_fn, f"its weight is a {type(self.weight).__name__}, not a tensor")
        self._ignored = int(setting_of(loss_fn, "ignore_index", IGNORE_INDEX))
        self.is_token_entropy = self.shifts and self.weight is None and is_cross_entropy(loss_fn)
        self.label_kind = LabelKind.NEXT_TOKEN if self.is_token_entropy else None
        self.ignore_index = None if self.unit == "elements" else self._ignored

    def _count(self, batch: Any) -> float | Tensor:
        """Returns the divisor of the loss's mean: the number of targets or elements, or the sum of class weights."""
        labels = self._targets(batch)
        if labels is None:
            return num_rows(batch)
        if self.divides:
            return count_items(labels, ignore_index=self._ignored)
        if self.unit == "elements":
            return labels.numel()
        if self.unit == "classes" and labels.is_floating_point():  # class probabilities: one target per position
            return labels.numel() // (labels.shape[1] if labels.ndim > 1 else labels.shape[0])
        if self.weight is None:
            return count_valid(labels, batch, ignore_index=self._ignored)
        total = self.weight.to(labels.device)[labels[labels != self._ignored]].sum()
        return float(total) if total.device.type == "cpu" else total

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        labels = self._targets(batch)
        if labels is None and self._needs_labels:
            raise no_labels(batch, "a loss_fn takes logits and labels: name the column of targets 'labels'")
        if self._has_decoder and isinstance(batch, Mapping) and not _DECODER_INPUTS & batch.keys():
            raise TrainingError(
                "the decoder makes its inputs from the labels, which a model with a loss_fn of (logits, labels) does "
                "not get",
                code="FG961",
                hint="remove loss_fn: the model computes the cross entropy of the target tokens itself",
            )
        logits = logits_of(self._inputs.call(model, batch))
        if self.shifts and labels is not None:
            logits, labels = flat_logits(logits), labels.reshape(-1)
            if self.unit != "classes":
                # A function of the user need not know the ignore index: it gets only valid labels.
                real = labels != self._ignored
                logits, labels = logits[real], labels[real]
        logits = at_least_float32(logits) if logits.is_floating_point() else logits
        if logits.device != self._device:
            self.call, self._device = on_device(self.call, logits.device), logits.device
        given = (logits,) if labels is None else (logits, labels)
        if labels is not None and logits.shape != labels.shape:
            self._pairs(functools.partial(self.call, num_items_in_batch=1) if self.divides else self.call, given)
        if not self.divides:
            # A loss with reduction "none" returns one value per target.
            loss: Tensor = self.call(*given)
            total = at_least_float32(loss if loss.ndim == 0 else loss.sum())
            self._check(self.call, total, lambda: self.count(batch), given)
            return total
        # The loss divides by the number that the gradients will be divided by, so the product is the sum for any
        # number.
        divisor = self.count(batch) if denom is None else denom
        total = at_least_float32(self.call(*given, num_items_in_batch=divisor)) * divisor
        self._check(self.call, total, lambda: divisor, given)
        return total


def logits_of(output: Any) -> Tensor:
    """Returns the logits in a model's output: a tensor, the first item of a tuple, or the entry "logits".

    Shapes:
        Returns (B, T, V) from a language model, or the shape of the model's output.

    Raises:
        TrainingError: FG809 if the output has no logits.
    """
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, MAPPINGS) else getattr(output, "logits", None)
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if isinstance(found, Tensor):
        return found
    raise TrainingError(
        f"the model returned {_shape_of(output)}, without logits",
        code="FG809",
        hint="return a tensor, a tuple with the logits first, or a mapping with 'logits'",
    ).about("model")


def without_loss(output: Any) -> Any:
    """Returns a model's output without its loss, which is the entry "loss" of a mapping or the first item of a tuple.

    Shapes:
        Returns the model's output.
    """
    if isinstance(output, Mapping):
        return {name: value for name, value in output.items() if name != "loss"}
    return tuple(output[1:]) if isinstance(output, tuple | list) else output


def _returned_loss(output: Any) -> Tensor:
    found = output
    if isinstance(output, MAPPINGS):
        found = output.get("loss")
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found if found.ndim == 0 else found.reshape(())
    raise TrainingError(
        f"the model returned {_shape_of(output)}, without a loss",
        code="FG809",
        hint="give the trainer a loss_fn, or return the loss as a scalar, as 'loss', or first in a tuple",
    ).about("model")


def _shape_of(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return "a mapping with " + (", ".join(repr(str(name)) for name in output) or "nothing")
    return f"a {type(output).__name__}"
