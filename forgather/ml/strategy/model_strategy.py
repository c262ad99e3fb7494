"""The base class of all strategies except DeepSpeed's: backward passes, update, evaluation and state.

By default, an update is bit-identical to that of a plain torch loop, and no method waits for the device. All subclasses
use the same `update`. Strategies for several processes override the methods that `update` calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from forgather.ml.activation_offloading import saved_on_host
from forgather.ml.adapter_base import stored_state
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.distributed.layout import Layout
from forgather.ml.distributed.mesh import Mesh
from forgather.ml.losses import LossRule, at_least_float32
from forgather.ml.low_bit_optim import refuse_copies
from forgather.ml.strategy.backward_update import BackwardUpdate, kept_gradients
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.context_parallel import SequenceParts, sequence_parts
from forgather.ml.strategy.gradients import sum_over_group
from forgather.ml.strategy.initial_weights import build_whole, make_unset_weights
from forgather.ml.strategy.input_sizes import note_sizes
from forgather.ml.strategy.optimizer_step import OptimizerStep
from forgather.ml.strategy.precision import Precision
from forgather.ml.strategy.state import (
    local_optimizer_state,
    local_state,
    names_of,
    restore_optimizer,
    restore_weights,
)
from forgather.ml.train_mode import restored_train_modes
from forgather.ml.types import Evaluated, PaddingBatch, Topology, Update, Window

_NOTHING_TO_DO: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class ModelStrategy:
    """The base class of strategies that call `backward` themselves.

    A subclass sets `topology` in its constructor, and for several processes also `layout` and `mesh`. It extends or
    replaces `build`. If its gradients are not complete on one process, it overrides `_gradient_sync`, `_backward`,
    `_reduce_gradients`, `_grad_norm` and `_clip_gradients` as needed.
    """

    title = ""
    builds_on_meta = False
    slices_per_weight = 1
    forward_is_collective = False
    parts = 1
    topology: Topology
    layout = Layout()
    mesh: Mesh
    model: nn.Module
    view: nn.Module
    engine: nn.Module
    """The module that training calls: the model, or the wrapper around the model that reduces gradients over ranks."""
    rule: LossRule
    precision: Precision
    optimizer: Optimizer | None = None
    _recipe: Recipe
    _scaling: Mapping[str, Any] | None = None
    _sequence: SequenceParts | None = None
    """What divides the positions of rows over ranks; None if each rank computes whole rows."""
    _parameters: list[nn.Parameter]
    _step: OptimizerStep
    backward_update: BackwardUpdate | None = None
    """What steps the optimizer inside of backward passes; None if `update` steps it."""
    _is_reduced = False

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule, moves the model to the device, and applies the `prepare` steps."""
        self._recipe = recipe
        self.model = self.view = self.engine = build_whole(recipe, self.topology)
        self.rule = recipe.make_rule(self.model)
        self._divide_positions()
        for step in recipe.prepare:
            step(self.model)
        self._set_precision(recipe.autocast)

    def make_unset_weights(self) -> None:
        """Gives the model its initial weights if it still waits for a checkpoint.

        Collective: every rank must call it.
        """
        make_unset_weights(self.model, self._recipe, self.topology)

    def _divide_positions(self) -> None:
        """Divides the positions of rows over the context-parallel ranks, if the layout has some.

        Raises:
            DistributedError: FG757, FG758 or FG759 if the rows of this model cannot be divided.
        """
        if self.layout.context_parallel_size > 1:
            of_run = self._recipe, self.layout, self.mesh.cp_group, self.topology.device
            self._sequence = sequence_parts(self.model, self.rule, *of_run)

    def _set_precision(self, autocast: torch.dtype | None, *, overflow_group: Any = None) -> None:
        """Collects the trainable parameters and sets `precision`; see `Precision` for the arguments."""
        self._parameters = [parameter for parameter in self.local.parameters() if parameter.requires_grad]
        self.precision = Precision(self.topology.device, autocast, scaling=self._scaling, overflow_group=overflow_group)
        self.precision.check(self._parameters)

    @property
    def local(self) -> nn.Module:
        """The module whose parameters this rank trains: the model, or the rank's stages of a pipeline."""
        return self.model

    def build_optimizer(self) -> Optimizer:
        """Makes and returns the optimizer of the model. It must be called after `build`.

        Raises:
            DistributedError: FG707 if weights are to be updated in the backward pass, where gradients are not complete;
                FG708 if copies of weights are to be rounded at random.
            TrainingError: FG707 if the optimizer cannot update the weights one by one.
        """
        self.optimizer = self._recipe.make_optimizer(self.local)
        self._step = OptimizerStep(self.optimizer)
        if self.weights_have_copies:
            refuse_copies(self.optimizer, self.title, self.topology.world_size)
        if self._recipe.updates_in_backward:
            if not self.completes_gradients_in_backward:
                raise kept_gradients(self.title, self.topology.world_size)
            self.backward_update = BackwardUpdate(self.optimizer)
        return self.optimizer

    @property
    def weights_have_copies(self) -> bool:
        """Whether several processes update the same weights."""
        return self.topology.world_size > 1

    @property
    def completes_gradients_in_backward(self) -> bool:
        """Whether each gradient is complete, and needed no more, when autograd or the engine has accumulated it."""
        return self.topology.world_size == 1

    @property
    def skips_on_device(self) -> bool:
        """Whether the optimizer's `found_inf`, a flag on the device, can leave out a step."""
        return self._step.can_skip

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters on this rank that the optimizer has, by their names in the whole model."""
        names = names_of(self.local)
        return {names[id(parameter)]: parameter for parameter in self._parameters}

    def trained_parameters_changed(self) -> None:
        """Takes note that other parameters require gradients than before."""

    # -- one update ----------------------------------------------------------------------------------------------------

    def forward_backward(
        self, window: Window, *, denom: float | Tensor, after_micro_batch: Callable[[], None] | None = None
    ) -> Tensor:
        """Adds the gradients of a window, and returns the part of the loss from this rank's batches; see `Strategy`.

        Shapes:
            Returns a scalar tensor.
        """
        self._settle_loss_path(window)
        self._is_reduced = False
        if not self.local.training:  # not in every step: `train()` visits each module
            self.engine.train()
        total: Tensor | None = None
        last = len(window.batches) - 1
        for position, batch in enumerate(window.batches):
            part = batch if self._sequence is None else self._sequence.part(batch)
            loss = self._micro_step(to_device(part, self.topology.device), denom, is_last=position == last)
            total = loss if total is None else total if loss is None else total + loss
            if after_micro_batch is not None and position != last:
                after_micro_batch()
        return torch.zeros((), device=self.topology.device) if total is None else total

    def _settle_loss_path(self, window: Window) -> None:
        """Decides before the first step whether the loss is computed without logits."""
        path = getattr(self.rule, "path", None)
        if path is not None and path.is_undecided:
            # Compiled code would be compiled again for the few tokens of this call.
            with torch.compiler.set_stance("force_eager"), restored_train_modes(self.local):
                path.examine(self.local, window.batches[0], self.predict)

    def _micro_step(self, batch: Any, denom: float | Tensor, *, is_last: bool) -> Tensor | None:
        """Adds the gradients of a micro-batch, and returns its loss, or None on a rank that computes no loss."""
        computing = _NOTHING_TO_DO if self._sequence is None else self._sequence.computing(batch)
        with self._gradient_sync(is_last=is_last), computing:
            try:
                with self.precision.autocast(), self._saving():
                    total = self.rule.total(self.engine, batch, denom=denom)
            except IndexError as error:
                # torch says only "index out of range in self": the usual causes are a tokenizer of another size and
                # rows that are too long.
                note_sizes(error, self.model, batch)
                raise
            loss: Tensor = total / denom
            with _NOTHING_TO_DO if self.backward_update is None else self.backward_update.on(loss.detach()):
                self._backward(loss)
        return at_least_float32(loss.detach())

    def _saving(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context manager of a forward pass that determines where activations are kept."""
        return saved_on_host() if self._recipe.offload_activations else _NOTHING_TO_DO

    def _gradient_sync(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager that determines whether the backward pass of a micro-batch reduces gradients."""
        return _NOTHING_TO_DO

    def _backward(self, loss: Tensor) -> None:
        self.precision.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(
        self,
        *,
        max_norm: float,
        want_norm: bool,
        before_step: Callable[[Tensor | None], bool],
        after_step: Callable[[], None],
        squares: Tensor | None = None,
    ) -> Update:
        """Clips the gradients, steps the optimizer and zeroes the gradients; see `Strategy.update` for the arguments.

        After an overflow in float16, the step is skipped.

        Shapes:
            The gradient norm is a scalar tensor.
        """
        assert self.optimizer is not None, "build_optimizer comes first"  # noqa: S101
        self._complete_gradients()
        if self.precision.unscale(self.optimizer):
            self.discard()
            self.precision.update_scale()
            return Update(skipped=True)
        norm = None
        if (max_norm > 0 or want_norm) and self.backward_update is None:
            norm = self._grad_norm() if squares is None else squares.sqrt().to(self._norm_dtype)
        if norm is not None and max_norm > 0:
            self._clip_gradients(norm, max_norm)
        if before_step(norm):
            self.discard()
            self.precision.keep_scale()
            return Update(grad_norm=norm, skipped=True)
        self._step()
        after_step()
        self.precision.update_scale()
        self.discard()
        return Update(grad_norm=norm)

    def share_of_squares(self) -> Tensor | None:
        """Returns what this rank adds to the square of the gradients' norm; see `Strategy.share_of_squares`."""
        return None

    def _complete_gradients(self) -> None:
        # Before the norm is measured: it must be the norm of the complete gradients, so that it is equal on all ranks
        # and all of them make the same decision.
        if not self._is_reduced:
            self._reduce_gradients()
            self._is_reduced = True

    @property
    def _norm_dtype(self) -> torch.dtype:
        dtypes = {parameter.grad.dtype for parameter in self._parameters if parameter.grad is not None}
        # A stage without gradients does not know the dtype of the others.
        return torch.float64 if torch.float64 in dtypes or not dtypes else torch.float32

    def _reduce_gradients(self) -> None:
        """Sums over ranks the gradients that the backward passes of this optimizer step did not sum."""

    def _grad_norm(self) -> Tensor:
        """Returns the norm of all gradients, which is the same on every rank.

        Shapes:
            Returns a scalar tensor.
        """
        # Every process holds the same gradients here, so all compute the same norm and make the same decision.
        return get_total_norm([parameter.grad for parameter in self._parameters if parameter.grad is not None])

    def _clip_gradients(self, norm: Tensor, max_norm: float) -> None:
        clip_grads_with_norm_(self._parameters, max_norm, norm)

    def discard(self) -> None:
        """Drops the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    # -- evaluation ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Evaluated:
        """Returns the loss sum, the number of valid targets and the model's output for this rank's batch."""
        self._leave_training()
        with self.precision.autocast():
            # The model is called, not the engine: the engine's collectives would wait for ranks with fewer batches.
            total, output = self.rule.total_and_output(self.model, to_device(batch, self.topology.device))
        return Evaluated(total, self.rule.count(batch), output)

    @torch.no_grad()
    def evaluate_loss(self, batch: Any) -> Evaluated:
        """Returns what `evaluate` does, without the output where each rank has only its positions of it."""
        if self._sequence is None:
            return self.evaluate(batch)
        self._leave_training()
        part = to_device(self._sequence.part(batch), self.topology.device)
        num_valid = self.rule.count(batch)
        # A part may have no targets, by which a user's loss must not divide.
        denom = num_valid if isinstance(num_valid, Tensor) else max(num_valid, 1)
        with self._sequence.computing(part), self.precision.autocast():
            total = self.rule.total(self.model, part, denom=denom)
        # The ranks of the group have the same rows, hence equally many batches.
        return Evaluated(sum_over_group(total, self.mesh.cp_group, self.topology.device), num_valid, None)

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:
        """Returns the model's output for this rank's batch, which may have no labels.

        Shapes:
            Returns the model's output.
        """
        self._leave_training()
        with self.precision.autocast():
            return self.rule.output(self.model, to_device(batch, self.topology.device))

    @contextlib.contextmanager
    def generating(self) -> Iterator[nn.Module]:
        """Context manager in which the `generate` of its value, the model, may be called; see `Strategy`."""
        self._leave_training()
        # Compiled code would be compiled again for each length of a text.
        with torch.no_grad(), self.precision.autocast(), torch.compiler.set_stance("force_eager"):
            yield self.model

    def _leave_training(self) -> None:
        if self.model.training:
            self.model.eval()

    def reduce(self, value: Any) -> Any:
        """Returns, on every rank, the sum of a value over the data-parallel ranks."""
        return sum_over_group(value, self.mesh.dp_group, self.topology.device) if self.topology.dp_size > 1 else value

    # -- state ---------------------------------------------------------------------------------------------------------

    def capture(self) -> LocalState:
        """Returns the local state: the weights on this rank, and on the first data-parallel rank also the buffers."""
        optimizer = local_optimizer_state(self.model, self.optimizer, self.precision)
        state = stored_state(self.model, self.model.state_dict(keep_vars=True))
        return local_state(state, optimizer, is_first=self.topology.dp_rank == self.topology.cp_rank == 0)

    def restore(self, saved: CheckpointReader) -> None:
        """Restores the weights of a checkpoint; this rank reads its own part of each weight.

        Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the weights of another model.
        """
        restore_weights(self.model, self.model.state_dict(), [self.model], saved)

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Restores the optimizer state of a checkpoint; this rank reads its own part of the state.

        Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the state of another optimizer.
        """
        restore_optimizer(self.local, self.optimizer, saved, self.precision)

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) for each entry in the model's state, one at a time, with sharded weights gathered.

        Collective: every rank must iterate to the end.
        """
        yield from self.model.state_dict().items()


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns the batch with every tensor on `device`. Copies from pinned memory do not block the host.

    Args:
        batch: a tensor, or a mapping or sequence of batches. Other values are returned unchanged.
        device: the device of the returned tensors. If it is the CPU, the batch is returned unchanged, since batches are
            collated on the CPU.
    """
    if device.type == "cpu":  # where batches are collated
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(item, device) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(item, device) for item in batch)
    if isinstance(batch, PaddingBatch):
        return PaddingBatch(to_device(batch.batch, device))
    return batch
