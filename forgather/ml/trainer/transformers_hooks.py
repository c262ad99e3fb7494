"""Methods of transformers' `Trainer` in a user's subclass: `compute_loss` is called, others are refused.

`refuse_unused_hooks` raises for methods that would never be called, so that no code of the user is ignored silently.
`OwnLoss` is the loss rule of a trainer whose class overrides `compute_loss`.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forgather.errors import Diagnostic, TrainingError
from forgather.ml.losses import (
    LossRule,
    at_least_float32,
    count_items,
    is_causal_lm,
    labels_of,
    loss_rule,
    num_rows,
    shifted_labels,
)
from forgather.ml.model_inputs import ModelInputs, NoCache, with_labels
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.types import PaddingBatch
from forgather.trainer_hooks import HF_TRAINER, refusal, refused_hooks

_OURS = "forgather.ml."
# A class that derives from both trainers inherits transformers' methods: they are not the user's.
_NOT_THE_USERS = (_OURS, "transformers.", "builtins")


def refuse_unused_hooks(trainer: object) -> None:
    """Raises if the class of a trainer, or the object itself, has hooks that are never called.

    Raises:
        TrainingError: FG860 for hooks that no trainer of Forgather calls, FG861 for those that this trainer does not.
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
    """Yields (owner, name) for each attribute that a user defined on a trainer or its classes."""
    for kind in type(trainer).__mro__:
        if not kind.__module__.startswith(_NOT_THE_USERS):
            yield from ((kind.__name__, name) for name in vars(kind))
    yield from (("the trainer", name) for name in vars(trainer))


ITEMS = "num_items_in_batch"


class OwnLoss:
    """The loss rule of a user's `compute_loss`: turns its result into a sum.

    Args:
        method: the bound method.
        model: as it will be trained.
        rule: of the trainer without the method.
        said: returns whether the user's class declares that results are divided by `num_items_in_batch`; None if it
            declares nothing.
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
        """True if results are divided by `num_items_in_batch`, False if they are means over a micro-batch."""
        said = self._said()
        return self._reads_items if said is None else said

    def prepared(self, batch: Any) -> Any:
        """Returns the batch with unshifted labels, and without a mask that would mix packed documents."""
        if isinstance(batch, PaddingBatch):
            return PaddingBatch(self.prepared(batch.batch))
        return self._inputs.prepared(batch)

    def count(self, batch: Any) -> float | Tensor:
        """Returns the weight of a batch in the mean: its targets if the method divides by them, else its rows.

        Shapes:
            A count on the device is a scalar.
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
            model: called by the method.
            batch: one micro-batch.
            denom: number of targets that the method divides by; that of the batch by default.

        Shapes:
            Returns a scalar, in float32 or more.
        """
        if isinstance(batch, PaddingBatch):
            return self._total(model, batch.batch, denom) * 0.0
        return self._total(model, batch, denom)

    def _total(self, model: Callable[..., Any], batch: Any, denom: float | Tensor | None) -> Tensor:
        if not self.divides:
            return self._loss(model, batch, self._items(batch)) * num_rows(batch)
        # A batch whose labels are all ignored has the loss 0, not 0 / 0.
        items = denom if denom is not None else self._items(batch) or 1
        return self._loss(model, batch, items) * items

    def _loss(self, model: Callable[..., Any], batch: Any, items: float | Tensor) -> Tensor:
        inputs = with_labels(batch)  # a copy: methods commonly pop the labels
        given = {ITEMS: Items.from_number(items, labels_of(batch))} if self._takes_items else {}
        # transformers requests outputs in evaluation, and only the loss in training.
        evaluates = not torch.is_grad_enabled()
        # The counter is global to the class; only what this call adds belongs to the method.
        reads = Items.reads
        with self._no_cache.in_force():
            found = self._method(model, inputs, return_outputs=evaluates, **given)
        loss = found[0] if evaluates and isinstance(found, tuple | list) and found else found
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise self._no_loss(found)
        # `Items` propagates through tensor operations: it shows whether the result depends on the count.
        self._check(isinstance(loss, Items) or Items.reads > reads)
        return at_least_float32(loss.as_subclass(Tensor).reshape(()))

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
    """A tensor subclass that marks every result computed from it, like the number of items."""

    reads: ClassVar[int] = 0
    _READERS: ClassVar[frozenset[Any]] = frozenset(
        (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__index__)
    )

    @classmethod
    def from_number(cls, items: float | Tensor, labels: Tensor | None) -> Items:
        """Returns a number of items as a tensor on the device of the labels; of integer type if it is whole.

        transformers passes integers, too.

        Args:
            items: the number.
            labels: labels; None for the default device.

        Shapes:
            Returns a scalar.
        """
        device = labels.device if labels is not None else None
        if isinstance(items, Tensor):
            return items.detach().to(device).as_subclass(cls)
        return torch.tensor(int(items) if float(items).is_integer() else items, device=device).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts calls that turn the number into a Python number, after which the mark is lost."""
        if func in cls._READERS:
            Items.reads += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class WithOwnLoss:
    """The part of a trainer that a subclass overrides to define its own loss."""

    args: TrainingArguments
    loss_is_scaled_for_ga: bool | None = None
    """For a class that overrides `compute_loss`: whether it divides by `num_items_in_batch`.

    False means that it returns a mean over its micro-batch; None detects which of them from the result.
    """

    def make_rule(self, model: nn.Module, *, loss_fn: Callable[..., Any] | None) -> LossRule:
        """Returns the trainer's loss rule; that of `compute_loss` if a subclass overrides it.

        Args:
            model: as it will be trained.
            loss_fn: the user's loss of (logits, labels); None for none.

        Raises:
            TrainingError: FG806 and FG807, see `loss_rule`.
        """
        rule = self._rule = loss_rule(model, loss_fn=loss_fn, label_smoothing=self.args.label_smoothing_factor)
        if type(self).compute_loss is WithOwnLoss.compute_loss:
            return rule
        return OwnLoss(self.compute_loss, model, rule, said=lambda: self.loss_is_scaled_for_ga)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | float | None = None
    ) -> Any:
        """Returns the loss of a micro-batch; a subclass can override it.

        Args:
            model: called with the inputs.
            inputs: the micro-batch on the model's device, as the collator gave it.
            return_outputs: return (loss, outputs).
            num_items_in_batch: targets of the whole optimizer step, over all processes; the loss is divided by it.
                Without it, the loss is the mean over the micro-batch.

        Shapes:
            The loss and `num_items_in_batch` are scalars.

        Source:
            The method of `transformers.Trainer`, which averages the results of several processes; here the results
            divided by `num_items_in_batch` are summed.
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
    """Returns whether the code of a method loads `num_items_in_batch`, or passes on its keyword arguments."""
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
