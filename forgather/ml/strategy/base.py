"""The protocol between the training loop and a strategy, which computes optimizer steps.

A strategy takes a `Recipe` (how to make the model, its loss rule and the optimizer) and windows. A window is the list
of the micro-batches of one optimizer step. Each rank divides its sum of losses by the number of valid targets on all
ranks, so the losses of the ranks can be added. After the loss is known to be finite, `update` clips the gradients,
steps the optimizer and zeroes the gradients in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.distributed.layout import Layout
from forgather.ml.losses import LossRule
from forgather.ml.types import Evaluated, Topology, Update, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make the model, its loss rule and its optimizer.

    Args:
        make_model: a function that returns the model, on any device.
        make_rule: a function that returns the loss rule of the model, which determines how labels are shifted and which
            label value is ignored.
        make_optimizer: a function that returns the optimizer of the model. It is called after the weights were placed
            on devices.
        prepare: functions that are applied to the placed model in order, such as activation checkpointing and
            compilation.
        autocast: the dtype of forward passes under autocast. None to compute in the dtype of the weights.
        model_is_made_anew: True if each call of `make_model` makes a new model. Such a model can be made on the meta
            device, without memory, and filled later. False if `make_model` returns an existing model.
        model_key: a function that returns a cache key for the initial weights, so that a later run can read them from
            the cache. Two recipes with the same key must give the same weights, and the same random state after the
            model was made. None, or a function that returns None, if no such key is known.
        stored_in: the folder from which `make_model` loads the model as it is; None if it makes or changes weights.
        initial_weights: "sequential" if one process makes the model with values, "counter" if each rank computes the
            elements of its slices.
        updates_in_backward: True if the optimizer steps each weight inside of the backward pass.
        is_resumed: a function that returns whether a checkpoint will replace the weights before they are used, called
            on the main process. None if they are always made.
        offload_activations: True if training steps keep what they save for the backward pass in the memory of the host.
        context_method: how attention sees the positions that other context-parallel ranks have: "ulysses" or "ring".
        rotate_method: how a ring passes keys and values on: "allgather" or "alltoall".
    """

    make_model: Callable[[], nn.Module]
    make_rule: Callable[[nn.Module], LossRule]
    make_optimizer: Callable[[nn.Module], Optimizer]
    prepare: Sequence[Callable[[nn.Module], None]] = ()
    autocast: torch.dtype | None = None
    model_is_made_anew: bool = False
    model_key: Callable[[], str | None] | None = None
    stored_in: Path | None = None
    initial_weights: str = "sequential"
    updates_in_backward: bool = False
    is_resumed: Callable[[], bool] | None = None
    offload_activations: bool = False
    context_method: str = "ulysses"
    rotate_method: str = "allgather"


class Strategy(Protocol):
    """The computation of optimizer steps on one or several processes.

    `title` is the name of the strategy in output for users, and "" for a single process. `builds_on_meta` is True if
    `build` first makes the model on the meta device, so that a dry run can call `build`. `slices_per_weight` is the
    number of ranks over which each weight is split without DTensors. It is 1 if the strategy splits weights only by
    DTensors, or not at all. `forward_is_collective` is True if every rank must call the model at the same time. `parts`
    is the number of parts into which a micro-batch is divided: the model is called with one part at a time.

    The following attributes are valid after `build`, except for `optimizer`, which is valid after `build_optimizer`.
    `topology` is the position of this rank. `layout` has the sizes of the mesh axes. `model` is the model, or the part
    of the model on this rank. `rule` is the loss rule. `optimizer` updates the parameters on this rank. `view` is the
    model that callbacks get: if it is called on every rank at the same time, it computes the output of the whole model.
    `view` also has the `config` of the model.

    Shapes:
        Every loss, loss sum and gradient norm is a scalar tensor.
    """

    title: str
    builds_on_meta: bool
    slices_per_weight: int
    forward_is_collective: bool
    parts: int
    topology: Topology
    layout: Layout
    model: nn.Module
    view: nn.Module
    rule: LossRule
    optimizer: Optimizer | None

    @property
    def skips_on_device(self) -> bool:
        """Whether the optimizer's `found_inf`, a flag on the device, can leave out a step."""
        ...

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule, places the model on devices, and applies the recipe's `prepare` steps."""
        ...

    def make_unset_weights(self) -> None:
        """Gives the model its initial weights if it still waits for a checkpoint.

        Collective: every rank must call it.
        """
        ...

    def build_optimizer(self) -> Optimizer:
        """Makes and returns the optimizer of the model. It must be called after `build`."""
        ...

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters on this rank that the optimizer has, by their names in the whole model.

        Sharded weights that are gathered are sharded again, so that what is read and written is what the optimizer
        steps.
        """
        ...

    def trained_parameters_changed(self) -> None:
        """Takes note that other parameters require gradients than before. It must be called between two steps."""
        ...

    def forward_backward(
        self, window: Window, *, denom: float | Tensor, after_micro_batch: Callable[[], None] | None = None
    ) -> Tensor:
        """Adds the gradients of a window, and returns the part of the loss that comes from the batches of this rank.

        A strategy may sum the gradients over ranks here or in `update`.

        Args:
            window: the micro-batches of one optimizer step.
            denom: the number of valid targets on all ranks and in all micro-batches.
            after_micro_batch: a function that is called after each micro-batch except the last. None if no function is
                called.

        Shapes:
            Returns a scalar tensor.
        """
        ...

    def share_of_squares(self) -> Tensor | None:
        """Returns what this rank adds to the square of the gradients' norm, before `update`.

        None if `update` measures the norm without a collective, or can measure it only by itself.

        Shapes:
            Returns a scalar tensor.
        """
        ...

    def update(
        self,
        *,
        max_norm: float,
        want_norm: bool,
        before_step: Callable[[Tensor | None], bool],
        after_step: Callable[[], None],
        squares: Tensor | None = None,
    ) -> Update:
        """Clips the gradients, steps the optimizer and zeroes the gradients.

        Args:
            max_norm: the largest gradient norm; larger norms are clipped. 0 leaves the gradients unchanged.
            want_norm: True to measure the norm even if the gradients are not clipped.
            before_step: a function that is called before the weights change. Its argument is the norm of the gradients
                before clipping, or None if the norm is not measured before the step. If the function raises, the
                weights are unchanged. If it returns True, the gradients are dropped and the step is skipped.
            after_step: a function that is called after the step, unless the step is skipped. The gradients are not yet
                zeroed when it is called, unless the strategy steps and zeroes in one operation.
            squares: the square of the norm, summed over all ranks from their `share_of_squares`. None to measure the
                norm here, if it is needed.

        Returns:
            The gradient norm before clipping, and whether the step was skipped.

        Shapes:
            The gradient norm is a scalar tensor.
        """
        ...

    def discard(self) -> None:
        """Drops the gradients."""
        ...

    def evaluate(self, batch: Any) -> Evaluated:
        """Returns the loss sum, the number of valid targets and the model's output for a batch, without gradients."""
        ...

    def evaluate_loss(self, batch: Any) -> Evaluated:
        """Returns what `evaluate` does where nobody reads the output of the model, which may be left out or partial."""
        ...

    def predict(self, batch: Any) -> Any:
        """Returns the model's output for a batch that may have no labels, without gradients.

        Returns None on a rank that does not have the last stage of a pipeline.

        Shapes:
            Returns the model's output.
        """
        ...

    def generating(self) -> AbstractContextManager[nn.Module]:
        """Returns a context manager in which the `generate` of its value, a model, may be called.

        The model computes in the precision of the training, without gradients and without compiled code. If
        `forward_is_collective`, all ranks must compute the same number of tokens.
        """
        ...

    def reduce(self, value: Any) -> Any:
        """Returns, on every rank, the sum of a value over the ranks that compute the loss.

        The value of a rank that does not compute the loss (in an early stage of a pipeline) is treated as zero. So a
        number of targets is counted only once, even if several ranks read the same rows.
        """
        ...

    def capture(self) -> LocalState:
        """Returns this rank's part of the state of model and optimizer, for a checkpoint.

        Collective: every rank must call it. The names and global shapes do not depend on the layout of ranks. State
        that several ranks have may be in the result of each of them. The results of all ranks together are complete.
        """
        ...

    def restore(self, saved: CheckpointReader) -> None:
        """Restores the weights of a checkpoint; each rank reads its own part. Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the weights of another model. In this case no
                weight has changed.
        """
        ...

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Restores the optimizer state of a checkpoint. It must be called after `restore`.

        Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the state of another optimizer.
        """
        ...

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) for each entry in the model's state, one at a time, with sharded weights gathered.

        Collective: every rank must iterate to the end.
        """
        ...


def _build(strategy: Strategy, recipe: Recipe) -> None:
    strategy.build(recipe)


# Not an argument: the config makes the trainer, and a dry run cannot pass anything to it.
build_strategy: ContextVar[Callable[[Strategy, Recipe], None]] = ContextVar("build_strategy", default=_build)
"""The function that a trainer calls to build its strategy. A dry run replaces it to build without weights in memory."""
