"""The protocol between the loop and the way an update is computed.

Takes a `Recipe` (how to make model, loss rule and optimizer) and windows of micro-batches; gives losses
and updates. Keeps true: a loss is this process's share of a sum divided by a global number of targets,
so shares add up; `update` is clip, step and zero as one act, after the loss was found finite.
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
    """How to make what is trained.

    Args:
        make_model: gives the model, on whatever device.
        make_rule: gives the loss rule of the model.
        make_optimizer: gives the optimizer of the model where it lies.
        prepare: applied to the model where it lies, in order (checkpointing, compilation).
        autocast: the type of forward passes under autocast; None for that of the weights.
        model_is_made_anew: True where `make_model` makes a model each time, so that it can be made without memory
            on the meta device and filled later; False where it returns one that exists.
        model_key: gives a key that names all that the weights, and the random numbers after them, depend on, so that
            a later run need not make them again; None where nobody knows.
    """

    make_model: Callable[[], nn.Module]
    make_rule: Callable[[nn.Module], LossRule]
    make_optimizer: Callable[[nn.Module], Optimizer]
    prepare: Sequence[Callable[[nn.Module], None]] = ()
    autocast: torch.dtype | None = None
    model_is_made_anew: bool = False
    model_key: Callable[[], str | None] | None = None


class Strategy(Protocol):
    """How one update is computed.

    These attributes are valid after `build` (the optimizer after `build_optimizer`): `topology` is the place of this
    process, `layout` has the sizes of the axes, `model` is the model or the part of it on this process, `rule` counts
    and sums losses, `optimizer` has the parameters of this process. `view` is what callbacks see as the model: called
    on every process at once, it computes as the whole model does, and has its `config`.
    """

    topology: Topology
    layout: Layout
    model: nn.Module
    view: nn.Module
    rule: LossRule
    optimizer: Optimizer | None

    @property
    def title(self) -> str:
        """The name of the strategy for people; "" for one process."""
        ...

    @property
    def builds_on_meta(self) -> bool:
        """True where `build` makes the model on the meta device first, so that a dry run can call it."""
        ...

    @property
    def slices_per_weight(self) -> int:
        """Over how many processes each weight is split, beside what a DTensor says of itself."""
        ...

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule, places and prepares it."""
        ...

    def build_optimizer(self) -> Optimizer:
        """Makes the optimizer of the model as it was built."""
        ...

    def forward_backward(
        self, window: Window, *, denom: float | Tensor, after_micro_batch: Callable[[], None] | None = None
    ) -> Tensor:
        """Adds the gradients of a window; returns this process's share of its loss.

        Args:
            window: micro-batches of one update.
            denom: number of valid targets over all processes and micro-batches.
            after_micro_batch: called after each micro-batch but the last.
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
        """Clips, steps and zeroes, as one act; tells whether the update was left out.

        Args:
            max_norm: clip to this norm; 0 leaves gradients as they are.
            want_norm: measure the norm where it is not clipped.
            before_step: called before the weights change, with the norm before clipping (None where only the
                step itself measures it); an exception leaves the weights untouched, and so does an answer that is
                true, after which gradients are dropped and the optimizer is as it was.
            after_step: called after the step; before gradients are zeroed, where these are two acts.
        """
        ...

    def discard(self) -> None:
        """Drops the gradients."""
        ...

    def evaluate(self, batch: Any) -> tuple[Tensor, float | Tensor]:
        """Returns the loss sum and the number of valid targets of a batch, without gradients."""
        ...

    def reduce(self, value: Any) -> Any:
        """Returns the sum of a value over the processes that hold a share of the loss, on every process.

        The value of a process without a share (the first stages of a pipeline) counts as zero, so a number of
        targets is counted once, however many processes see the same rows.
        """
        ...

    def capture(self) -> LocalState:
        """Returns what of the state lies here, under names and shapes that no layout of processes changes.

        Every process calls it. What several hold alike may be in each of theirs; together it is all.
        """
        ...

    def restore(self, saved: CheckpointReader) -> None:
        """Goes on with the weights of a checkpoint, reading what lies here; every process calls it.

        Raises:
            CheckpointError: FG605, on every process, where they are those of another model; nothing has changed then.
        """
        ...

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Goes on with the optimizer of a checkpoint, after `restore`; every process calls it.

        Raises:
            CheckpointError: FG605, on every process, where it is the state of another one.
        """
        ...

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields the state of the model by name, each weight whole, one at a time; every process iterates over it."""
        ...


def _build(strategy: Strategy, recipe: Recipe) -> None:
    strategy.build(recipe)


build_strategy: ContextVar[Callable[[Strategy, Recipe], None]] = ContextVar("build_strategy", default=_build)
"""How a trainer has its strategy built; a dry run has it built without memory."""
