"""Methods of transformers' `Trainer` in a user's trainer class: `compute_loss`, and hooks that are never called.

`refuse_unused_hooks` raises an error for methods that would never be called, so that no code of the user is ignored
silently. `OwnLoss` is the loss rule of a trainer whose class overrides `compute_loss`. A loss rule determines how the
loss of a micro-batch is computed and how the losses of several micro-batches are combined.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forgather.errors import Diagnostic, TrainingError
from forgather.ml.batch_sizes import num_rows
from forgather.ml.loss_path import LOGITS, PathSettings
from forgather.ml.losses import (
    Loss,
    LossRule,
    at_least_float32,
    count_items,
    is_causal_lm,
    labels_of,
    loss_rule,
    shifted_labels,
    without_loss,
)
from forgather.ml.model_inputs import ModelInputs, NoCache, with_labels
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.types import PaddingBatch
from forgather.trainer_hooks import HF_TRAINER, refusal, refused_hooks

_OURS = "forgather.ml."
# A class that derives from both trainers inherits transformers' methods: they are not the user's.
_NOT_THE_USERS = (_OURS, "transformers.", "builtins")


def refuse_unused_hooks(trainer: object) -> None:
    """Raises an error if a user's trainer defines methods of transformers' `Trainer` that would never be called.

    Args:
        trainer: the trainer, whose classes and own attributes are searched.

    Raises:
        TrainingError: FG860 if no trainer of Forgather calls the method; FG861 if this class of trainer does not.
    """
    found = list(_refused(trainer))
    if found:
        first, *rest = found
        raise TrainingError(first.message, code=first.code, hint=f"{first.hint}; or {HF_TRAINER}", others=rest)


def _refused(trainer: object) -> Iterator[Diagnostic]:
    ours = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith(_OURS)]
    refused = refused_hooks(ours)
    for owner, name in dict.fromkeys(_user_attributes(trainer)):
        if name in refused:
            code, hint = refused[name]
            yield Diagnostic(code=code, message=refusal(owner, name, f"forgather.ml:{ours[0]}"), hint=hint)
    if "compute_loss" in vars(trainer):
        message = "'compute_loss' was set on the trainer after it was made, and is not called"
        yield Diagnostic(code="FG860", message=message, hint="define it in a subclass of the trainer")


def _user_attributes(trainer: object) -> Iterator[tuple[str, str]]:
    """Yields (owner, name) for each attribute of a trainer object and of the user-defined classes among its bases."""
    for kind in type(trainer).__mro__:
        if not kind.__module__.startswith(_NOT_THE_USERS):
            yield from ((kind.__name__, name) for name in vars(kind))
    yield from (("the trainer", name) for name in vars(trainer))


ITEMS = "num_items_in_batch"


class OwnLoss:
    """The loss rule for a user's `compute_loss`, which determines how the losses of several micro-batches are combined.

    The result of the method is multiplied by its divisor, so that the results of micro-batches can be added.

    Args:
        method: the bound method `compute_loss`.
        model: the model to train.
        rule: the loss rule that the trainer would have without the method.
        said: a function that returns the class attribute `loss_is_scaled_for_ga`: whether the method divides by
            `num_items_in_batch`, or None if the user's class does not set the attribute.
    """

    def __init__(
        self, method: Callable[..., Any], model: nn.Module, rule: LossRule, *, said: Callable[[], bool | None]
    ) -> None:
        self._method, self._said = method, said
        self._inputs, self._no_cache = ModelInputs(model), NoCache(model)
        self._is_causal = is_causal_lm(model)
        self._takes_items = _takes_argument(method, ITEMS)
        self._reads_items = _reads_items(method)
        self.ignore_index = rule.ignore_index

    @property
    def divides(self) -> bool:
        """True if the method divides by `num_items_in_batch`; False if it returns a mean over a micro-batch."""
        said = self._said()
        return self._reads_items if said is None else said

    def prepared(self, batch: Any) -> Any:
        """Returns the batch with unshifted labels, and with inputs that stop attention at document boundaries."""
        if isinstance(batch, PaddingBatch):
            return PaddingBatch(self.prepared(batch.batch))
        return self._inputs.prepared(batch)

    def count(self, batch: Any) -> float | Tensor:
        """Returns the weight of a batch in the mean loss of several batches.

        The weight is the number of targets if the method divides by `num_items_in_batch`, and otherwise the number of
        rows. A padding batch has the weight 0.

        Shapes:
            Returns a Python number, or a scalar tensor if the count is on a device.
        """
        if isinstance(batch, PaddingBatch):
            return 0
        return self._items(batch) if self.divides else num_rows(batch)

    def _items(self, batch: Any) -> float | Tensor:
        labels = labels_of(batch)
        if labels is None:
            return num_rows(batch)
        return count_items(shifted_labels(labels) if self._is_causal else labels)

    def total(self, model: Callable[..., Any], batch: Any, *, denom: float | Tensor | None = None) -> Tensor:
        """Returns the method's result times its divisor, so that the results of micro-batches can be added.

        Args:
            model: the model that is passed to the method.
            batch: the micro-batch.
            denom: the number of targets by which the method divides; by default that of the micro-batch.

        Shapes:
            Returns a scalar tensor, in float32 or a wider type.

        Raises:
            TrainingError: FG862 if it cannot be determined whether the method divides by `num_items_in_batch`; FG863
                if the method does not return a loss.
        """
        return self._total(model, batch, denom)[0]

    def total_and_output(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, Any]:
        """Returns the method's result times its divisor, and the outputs that the method returned with the loss.

        The outputs are those without the loss, and None if the method returned the loss alone.

        Shapes:
            Returns a scalar tensor, and the model's output.
        """
        return self._total(model, batch, None)

    def output(self, model: Callable[..., Any], batch: Any) -> Any:
        """Returns the output of the model for a batch that may have no labels. The method is not called.

        Shapes:
            Returns the model's output.
        """
        return self._inputs.call(model, self.prepared(batch.batch if isinstance(batch, PaddingBatch) else batch))

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> tuple[Tensor, Any]:
        if isinstance(batch, PaddingBatch):
            loss, output = self._total(model, batch.batch, denom)
            return loss * 0.0, output
        if not self.divides:
            loss, output = self._call(model, batch, self._items(batch))
            return loss * num_rows(batch), output
        # A batch whose labels are all ignored has the loss 0, not 0 / 0.
        items = denom if denom is not None else self._items(batch) or 1
        loss, output = self._call(model, batch, items)
        return loss * items, output

    def _call(self, model: Callable[..., Any], batch: Any, items: float | Tensor) -> tuple[Tensor, Any]:
        inputs = with_labels(batch)  # a copy: methods commonly pop the labels
        given = {ITEMS: Items.from_number(items, labels_of(batch))} if self._takes_items else {}
        # transformers requests outputs in evaluation, and only the loss in training.
        evaluates = not torch.is_grad_enabled()
        # The counter is global to the class; only what this call adds belongs to the method.
        reads = Items.reads
        with self._no_cache.in_force():
            found = self._method(model, inputs, return_outputs=evaluates, **given)
        has_outputs = evaluates and isinstance(found, tuple | list) and bool(found)
        loss = found[0] if has_outputs else found
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise self._no_loss(found)
        # `Items` propagates through tensor operations: it shows whether the result depends on the count.
        self._check(isinstance(loss, Items) or Items.reads > reads)
        output = without_loss(found[1]) if has_outputs and len(found) > 1 else None
        return at_least_float32(loss.as_subclass(Tensor).reshape(())), output

    def _check(self, divides: bool) -> None:
        # The divisor was chosen before the call, from the method's code. If the result contradicts that choice, it
        # would be scaled by a wrong number.
        if self._said() is not None or divides == self._reads_items:
            return
        does = "depends on it" if divides else "does not depend on it"
        raise TrainingError(
            f"{self._name} seems to {'ignore' if divides else 'use'} {ITEMS}, and its result {does}",
            code="FG862",
            hint="declare it on the class: loss_is_scaled_for_ga = True if the result is divided by "
            f"{ITEMS}, False if it is a mean over the micro-batch",
        )

    def _no_loss(self, found: Any) -> TrainingError:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        return TrainingError(
            f"{self._name} returned a {type(found).__name__}{shape}, which is not a loss",
            code="FG863",
            hint="return a tensor with one number, or (loss, outputs) if return_outputs is true",
        )

    @property
    def _name(self) -> str:
        return str(getattr(self._method, "__qualname__", "compute_loss"))


class Items(Tensor):
    """A tensor subclass for `num_items_in_batch`. Every tensor that is computed from such a tensor has this class, too.

    The class of a loss therefore shows whether the loss depends on the number of items.
    """

    reads: ClassVar[int] = 0
    _READERS: ClassVar[frozenset[Any]] = frozenset(
        (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__index__)
    )

    @classmethod
    def from_number(cls, items: float | Tensor, labels: Tensor | None) -> Items:
        """Returns a number of items as a tensor on the device of the labels.

        A whole Python number becomes an integer tensor, which is what transformers passes.

        Args:
            items: the number of items.
            labels: the labels, whose device is used; None uses the default device.

        Shapes:
            Returns a scalar tensor.
        """
        device = labels.device if labels is not None else None
        if isinstance(items, Tensor):
            return items.detach().to(device).as_subclass(cls)
        return torch.tensor(int(items) if float(items).is_integer() else items, device=device).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the calls that convert the tensor to a Python number or an array, which do not have this class."""
        if func in cls._READERS:
            Items.reads += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _refuse_uncompared(args: TrainingArguments, loss: str) -> None:
    """Raises an error for a setting with which a loss of its own rule was not compared with a plain loop."""
    for name, code, value, how in (
        ("fp8", "FG793", args.fp8, "in float8"),
        ("bf16_stochastic_round", "FG708", args.bf16_stochastic_round, "with weights rounded at random"),
        ("use_liger_kernel", "FG790", args.use_liger_kernel, "with Liger's kernels"),
    ):
        if value:
            raise TrainingError(
                f"{name} is {'true' if value is True else value}, and {loss} was not compared with a plain loop {how}",
                code=code,
                hint=f"remove {name}",
            ).about(f"args.{name}")


class WithOwnLoss:
    """Base class of trainers whose subclasses can define another loss by overriding `compute_loss`."""

    args: TrainingArguments
    loss_is_scaled_for_ga: bool | None = None
    """Whether an overridden `compute_loss` divides the loss by `num_items_in_batch`.

    False means that the method returns a mean over the micro-batch. None means that the trainer finds out from the
    method's code and its result.
    """

    def make_rule(self, model: nn.Module, *, loss_fn: Loss | None) -> LossRule:
        """Returns the trainer's loss rule. If a subclass overrides `compute_loss`, the rule calls that method.

        Args:
            model: the model to train.
            loss_fn: the user's loss function of (logits, labels), a loss object, or None.

        Raises:
            TrainingError: FG708, FG790 or FG793 if the loss makes its own rule, as those of preferences, and weights
                are rounded at random, or the model gets Liger's kernels or computes in float8; FG806 or FG807 if the
                loss cannot be used, see `loss_rule`.
        """
        if hasattr(loss_fn, "loss_rule"):
            _refuse_uncompared(self.args, type(loss_fn).__name__)
        has_own_loss = type(self).compute_loss is not WithOwnLoss.compute_loss
        rule = self._rule = loss_rule(
            model,
            loss_fn=loss_fn,
            label_smoothing=self.args.label_smoothing_factor,
            z_loss=self.args.z_loss_coefficient,
            path=self._path_settings(has_own_loss=has_own_loss),
        )
        if not has_own_loss:
            return rule
        return OwnLoss(self.compute_loss, model, rule, said=lambda: self.loss_is_scaled_for_ga)

    def _path_settings(self, *, has_own_loss: bool) -> PathSettings:
        kernel = self.args.linear_cross_entropy
        if has_own_loss and kernel not in ("auto", False):
            raise TrainingError(
                f"linear_cross_entropy is {kernel!r}, and {type(self).__name__} computes the loss in a method of its "
                "own, which may read logits",
                code="FG716",
                hint="remove linear_cross_entropy",
            ).about("args.linear_cross_entropy")
        return LOGITS if has_own_loss else PathSettings(kernel, self.args.linear_cross_entropy_chunk_size)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | float | None = None
    ) -> Any:
        """Returns the loss of a micro-batch. A subclass can override this method to define its own loss.

        Args:
            model: the model, which is called with the inputs.
            inputs: the micro-batch that the collator returned, on the model's device.
            return_outputs: whether to return (loss, outputs) instead of the loss alone.
            num_items_in_batch: the number of targets of the whole optimizer step over all processes, by which the sum
                of the losses is divided. If it is None, the mean over the micro-batch is returned.

        Shapes:
            The loss is a scalar tensor; `num_items_in_batch` is a Python number or a scalar tensor.

        Source:
            `transformers.Trainer.compute_loss`. Difference: transformers averages the losses of several processes, and
            Forgather sums the losses that are divided by `num_items_in_batch`.
        """
        outputs: list[Any] = []

        def called(*args: Any, **kwargs: Any) -> Any:
            outputs.append(model(*args, **kwargs))
            return outputs[-1]

        batch = self._rule.prepared(inputs)
        counted = self._rule.count(batch)
        denom = counted if num_items_in_batch is None else num_items_in_batch
        loss = self._rule.total(called, batch, denom=denom) / denom
        labels = labels_of(batch)
        if num_items_in_batch is not None and labels is not None and labels.is_floating_point():
            loss = loss * (count_items(labels) / counted)  # of a regression, transformers counts numbers, not rows
        return (loss, outputs[-1]) if return_outputs else loss


def _takes_argument(method: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def _reads_items(method: Callable[..., Any]) -> bool:
    """Returns whether the code of a method reads `num_items_in_batch` or its `**kwargs`."""
    if not _takes_argument(method, ITEMS):
        return False
    # The code of the user's function, not of a decorator around it.
    function = inspect.unwrap(getattr(method, "__func__", method))
    code = getattr(function, "__code__", None)
    # A callable in native code cannot be read; what takes the argument is assumed to use it.
    if code is None:
        return True
    names = {ITEMS} | {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD}
    return any(
        step.argval in names or (isinstance(step.argval, tuple) and names & {*step.argval})
        for step in dis.get_instructions(code)
        if step.opname.startswith("LOAD")
    )
