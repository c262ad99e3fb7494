"""The protocol between the training loop and a strategy, which computes optimizer steps.

A strategy takes a `Recipe` (how to make the model, the loss rule and the optimizer) and windows of micro-batches. A
loss is the share of this process in a sum that is divided by the number of valid targets of all processes, so that
shares can be added. `update` clips, steps and zeroes in one call, after the loss was found to be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.distributed.layout import Layout
from forgather.ml.losses import LossRule
from forgather.ml.types import Topology, Update, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make the model, its loss rule and its optimizer.

    Args:
        make_model: returns the model, on any device.
        make_rule: returns the loss rule of the model.
        make_optimizer: returns the optimizer of the model, after its weights were placed on devices.
        prepare: functions applied to the placed model, in order (activation checkpointing, compilation).
        autocast: dtype of forward passes under autocast; None for the dtype of the weights.
        model_is_made_anew: True if each call of `make_model` makes a new model, so that it can be made without memory
            on the meta device and filled later; False if it returns an existing one.
        model_key: returns a key that covers everything that the initial weights, and the random numbers drawn after
            them, depend on, so that a later run can read them from the cache; None if such a key is not known.
    """

    make_model: Callable[[], nn.Module]
    make_rule: Callable[[nn.Module], LossRule]
    make_optimizer: Callable[[nn.Module], Optimizer]
    prepare: Sequence[Callable[[nn.Module], None]] = ()
    autocast: torch.dtype | None = None
    model_is_made_anew: bool = False
    model_key: Callable[[], str | None] | None = None


class Strategy(Protocol):
    """How one optimizer step is computed.

    `title` is the name of the strategy for people, "" for a single process. `builds_on_meta` is True if `build` makes
    the model on the meta device first, so that a dry run can call it. `slices_per_weight` is the number of processes
    over which each weight is split, in addition to the placements of a DTensor.

    These attributes are valid after `build` (the optimizer after `build_optimizer`): `topology` is the position of this
    process, `layout` has the sizes of the axes, `model` is the model or its part on this process, `rule` counts and
    sums losses, `optimizer` has the parameters of this process. `view` is the model that callbacks get: called on every
    process at once, it computes what the whole model computes, and has its `config`.

    Shapes:
        Every loss, loss sum and gradient norm is a scalar tensor.
    """

    title: str
    builds_on_meta: bool
    slices_per_weight: int
    topology: Topology
    layout: Layout
    model: nn.Module
    view: nn.Module
    rule: LossRule
    optimizer: Optimizer | None

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule, and places and prepares the model."""
        ...

    def build_optimizer(self) -> Optimizer:
        """Makes the optimizer of the model after `build`."""
        ...

    def forward_backward(
        self, window: Window, *, denom: float | Tensor, after_micro_batch: Callable[[], None] | None = None
    ) -> Tensor:
        """Adds the gradients of a window, and returns this process's share of its loss.

        Args:
            window: micro-batches of one optimizer step.
            denom: number of valid targets over all processes and micro-batches.
            after_micro_batch: called after each micro-batch except the last.

        Shapes:
            Returns a scalar.
        """
        ...

    def update(
        self,
        *,
        max_norm: float,
        want_norm: bool,
        before_step: Callable[[Tensor | None], bool],
        after_step: Callable[[], None],
    ) -> Update:
        """Clips, steps and zeroes in one call, and returns whether the optimizer step was skipped.

        Args:
            max_norm: clip to this norm; 0 leaves the gradients unchanged.
            want_norm: measure the norm even if it is not clipped.
            before_step: called before the weights change, with the norm before clipping (None if only the step itself
                measures it). If it raises, the weights are unchanged. If it returns True, the gradients are dropped and
                the step is skipped.
            after_step: called after the step, and before the gradients are zeroed if these are two acts.

        Shapes:
            the norm: scalar.
        """
        ...

    def discard(self) -> None:
        """Drops the gradients."""
        ...

    def evaluate(self, batch: Any) -> tuple[Tensor, float | Tensor]:
        """Returns the loss sum and the number of valid targets of a batch, without gradients.

        Shapes:
            Returns a scalar, and a number or scalar.
        """
        ...

    def reduce(self, value: Any) -> Any:
        """Returns, on every process, the sum of a value over the processes that compute the loss.

        The value of a process that does not compute it (the first stages of a pipeline) counts as zero, so a number of
        targets is counted once, however many processes read the same rows.
        """
        ...

    def capture(self) -> LocalState:
        """Returns the local state, under names and with shapes that do not depend on the layout of processes.

        Collective. State that several processes hold may be in the local state of each; together it is complete.
        """
        ...

    def restore(self, saved: CheckpointReader) -> None:
        """Restores the weights of a checkpoint; each process reads its own part. Collective.

        Raises:
            CheckpointError: FG605, on every process, for the weights of another model; nothing has changed then.
        """
        ...

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Restores the optimizer state of a checkpoint, after `restore`. Collective.

        Raises:
            CheckpointError: FG605, on every process, for the state of another optimizer.
        """
        ...

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) of the model's state, each weight whole, one at a time. Collective."""
        ...


def _build(strategy: Strategy, recipe: Recipe) -> None:
    strategy.build(recipe)


# Not an argument: the config makes the trainer, and a dry run cannot pass anything to it.
build_strategy: ContextVar[Callable[[Strategy, Recipe], None]] = ContextVar("build_strategy", default=_build)
"""The function by which a trainer builds its strategy; a dry run replaces it to build without memory."""
