"""One process, one device.

Takes a recipe and windows; gives losses and updates of the model that lies on the device. Keeps true:
nothing here waits for the device, and an update equals the one a plain torch loop would make, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from forgather.errors import DistributedError
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.losses import LossRule
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.precision import Precision
from forgather.ml.strategy.state import held_optimizer, held_state, restore_optimizer, restore_weights
from forgather.ml.types import PaddingBatch, Topology, Update, Window


class SingleDevice:
    """The strategy of one process.

    Args:
        environment: who this process is.
        use_cpu: compute on the CPU though there is an accelerator.

    Raises:
        DistributedError: FG703 where several processes were started.
    """

    model: nn.Module
    view: nn.Module
    rule: LossRule
    optimizer: Optimizer | None = None

    def __init__(self, environment: DistributedEnvironment, *, use_cpu: bool = False) -> None:
        if environment.world_size > 1:
            raise DistributedError(
                f"this trainer runs in one process, and there are {environment.world_size} "
                f"(this is rank {environment.rank})",
                code="FG703",
                hint="extend trainers/accel_trainer.yaml or trainers/pipeline_trainer.yaml, or start one process",
            )
        device = torch.device("cpu") if use_cpu else environment.device
        self.topology = Topology(rank=environment.rank, world_size=1, device=device, is_writer=True)

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule, places and prepares it."""
        self._recipe = recipe
        self._precision = Precision(self.topology.device, recipe.autocast)
        self.model = recipe.make_model().to(self.topology.device)
        self.view = self.model
        self.rule = recipe.make_rule(self.model)
        for step in recipe.prepare:
            step(self.model)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._moves = self.topology.device.type != "cpu"

    def build_optimizer(self) -> Optimizer:
        """Makes the optimizer of the model as it was built."""
        self.optimizer = self._recipe.make_optimizer(self.model)
        return self.optimizer

    def _place(self, batch: Any) -> Any:
        return to_device(batch, self.topology.device) if self._moves else batch

    def forward_backward(
        self, window: Window, *, denom: float | Tensor, after_micro_batch: Callable[[], None] | None = None
    ) -> Tensor:
        """Adds the gradients of a window; returns its loss."""
        if not self.model.training:
            self.model.train()
        total: Tensor | None = None
        last = len(window.batches) - 1
        for position, batch in enumerate(window.batches):
            placed = self._place(batch)
            try:
                with self._precision.autocast():
                    loss = self.rule.total(self.model, placed, denom=denom)
            except IndexError as error:
                tell_sizes(error, self.model, placed)
                raise
            loss = loss / denom
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
            if after_micro_batch is not None and position != last:
                after_micro_batch()
        return torch.zeros((), device=self.topology.device) if total is None else total

    def update(
        self,
        *,
        max_norm: float,
        want_norm: bool,
        before_step: Callable[[Tensor | None], bool],
        after_step: Callable[[], None],
    ) -> Update:
        """Clips, steps and zeroes, as one act."""
        assert self.optimizer is not None, "build_optimizer comes first"  # noqa: S101
        norm = None
        if max_norm > 0:
            norm = clip_grad_norm_(self._parameters, max_norm)
        elif want_norm:
            norm = get_total_norm([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        if before_step(norm):
            self.discard()
            return Update(grad_norm=norm, skipped=True)
        self.optimizer.step()
        after_step()
        self.discard()
        return Update(grad_norm=norm)

    def discard(self) -> None:
        """Drops the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def evaluate(self, batch: Any) -> tuple[Tensor, float | Tensor]:
        """Returns the loss sum and the number of valid targets of a batch, without gradients."""
        if self.model.training:
            self.model.eval()
        placed = self._place(batch)
        with self._precision.autocast():
            total = self.rule.total(self.model, placed)
        return total, self.rule.count(batch)

    def reduce(self, value: Any) -> Any:
        """Returns the value: there is nobody to add to it."""
        return value

    def capture(self) -> LocalState:
        """Returns the state."""
        return held_state(self.model.state_dict(keep_vars=True), held_optimizer(self.model, self.optimizer))

    def restore(self, saved: CheckpointReader) -> None:
        """Goes on with the weights of a checkpoint.

        Raises:
            CheckpointError: FG605 where they are those of another model.
        """
        restore_weights(type(self.model).__name__, self.model.state_dict(), [self.model], saved)

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Goes on with the optimizer of a checkpoint.

        Raises:
            CheckpointError: FG605 where it is the state of another one.
        """
        restore_optimizer(self.model, self.optimizer, saved)

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields the state of the model by name."""
        yield from self.model.state_dict().items()


def tell_sizes(error: IndexError, model: nn.Module, batch: Any) -> None:
    """Adds what an embedding's "index out of range" leaves out."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    config: Any = getattr(model, "config", None)
    if isinstance(ids, Tensor) and ids.numel() and config is not None:
        words, places = (getattr(config, name, "?") for name in ("vocab_size", "max_position_embeddings"))
        has = f"{words} tokens and {places} positions"
        error.add_note(
            f"the batch has token ids up to {int(ids.max())} in rows of {ids.shape[-1]}; the model has {has}"
        )


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns the batch with every tensor on `device`; copies from pinned memory do not wait."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(item, device) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(item, device) for item in batch)
    if isinstance(batch, PaddingBatch):
        return PaddingBatch(to_device(batch.batch, device))
    return batch
