"""Weights shared among replicas (FSDP2), layers cut into slices (tensor parallelism), and both.

Takes a recipe and windows; gives losses and updates of the model, a part of which lies on each rank. Keeps true: an
update is the one that a single process makes of the rows of all replicas; what leaves here is whole (losses, norms,
exported weights) or has the names and shapes of the whole; no rank waits for a collective that another leaves out.

Collectives: gathering and scattering by torch's `fully_shard`, the sums of `reduce`, one norm in `update`, and one
gather per tensor in `export`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from forgather.errors import DistributedError
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.distributed.mesh import Mesh
from forgather.ml.losses import LossRule, is_causal_lm
from forgather.ml.model_class import class_name
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.strategy.fsdp_units import move_buffers, recompute, shard, units_of
from forgather.ml.strategy.gradients import clip, norm_of, sum_gradients, summed
from forgather.ml.strategy.initial_weights import initial_state
from forgather.ml.strategy.precision import Precision
from forgather.ml.strategy.single import tell_sizes, to_device
from forgather.ml.strategy.state import (
    held_optimizer,
    held_state,
    restore_optimizer,
    restore_weights,
    whole_model_state,
)
from forgather.ml.strategy.tensor_parallel import cut
from forgather.ml.types import Topology, Update, Window


class Sharded:
    """The strategy of shards and slices.

    Args:
        environment: who this process is.
        layout: how many replicas, and how many of them share one copy; how many slices.
        sharding: settings of FSDP2; None leaves the weights of a replica whole where there is one replica.
        tp_plan: which layers are cut, see `tensor_parallel.cut`.
        scaling: settings of the loss scale of float16.
        use_cpu: compute on the CPU though there is an accelerator.

    Raises:
        DistributedError: FG704 for a layout with pipeline stages.
    """

    model: nn.Module
    view: nn.Module
    rule: LossRule
    optimizer: Optimizer | None = None

    def __init__(
        self,
        environment: DistributedEnvironment,
        layout: Layout,
        *,
        sharding: Sharding | None = None,
        tp_plan: str | Mapping[str, Any] | None = None,
        scaling: Mapping[str, Any] | None = None,
        use_cpu: bool = False,
    ) -> None:
        if layout.pipeline_parallel_size != 1:
            raise DistributedError(
                f"pipeline_parallel_size is {layout.pipeline_parallel_size}, and this trainer has no stages",
                code="FG704",
                hint="use the pipeline trainer: -- extends 'trainers/pipeline_trainer.yaml'",
            )
        device = environment.start(use_cpu=use_cpu)
        self.mesh = Mesh.of(layout, device.type)
        self.topology = Topology(
            rank=environment.rank,
            world_size=environment.world_size,
            device=device,
            is_writer=environment.rank == 0,
            local_rank=environment.local_rank,
            dp_rank=self.mesh.position.data,
            dp_size=layout.data_parallel_size,
        )
        shared = sharding or (Sharding() if layout.data_parallel_size > 1 or layout.world_size == 1 else None)
        self._sharding = shared
        self._tp_plan = tp_plan
        self._scaling = scaling

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule, cuts, prepares, shards and fills it."""
        self._recipe = recipe
        weights = initial_state(recipe, self.topology)
        self.model = self.view = weights.on_meta()
        self.rule = recipe.make_rule(self.model)
        autocast = recipe.autocast
        if self._sharding is not None:
            self._sharding, autocast = self._sharding.under(autocast, takes_tokens=is_causal_lm(self.model))
        cut_modules: list[nn.Module] = []
        if self.mesh.layout.tensor_parallel_size > 1:
            cut_modules = cut(self.model, self.mesh.tp, self._tp_plan)
            # Logits of sliced heads are views of a custom function, which autograd forbids to change in place: what
            # fully_shard warns of cannot happen.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        units = [] if self._sharding is None else units_of(self.model, self._sharding)
        self._recompute(units)
        for step in recipe.prepare:
            step(self.model)
        self._refuse_double_recomputation()
        if self._sharding is not None:
            shard(self.model, units, self.mesh.shards, self._sharding)
        offloads = self._sharding is not None and self._sharding.cpu_offload
        weights.fill(self.model, device="cpu" if offloads else self.topology.device)
        if offloads:
            move_buffers(self.model, self.topology.device)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Ranks hold different gradients: an overflow of one is one of all.
        self.precision = Precision(
            self.topology.device, autocast, scaling=self._scaling, overflow_group=dist.group.WORLD
        )
        self.precision.check(self._parameters)
        self._summed = [p for module in cut_modules for p in module.parameters() if p.requires_grad]

    def _recompute(self, units: list[nn.Module]) -> None:
        if self._sharding is not None and self._sharding.recompute != "none":
            recompute(units or [self.model], self._sharding)

    def _refuse_double_recomputation(self) -> None:
        asked = self._sharding is not None and self._sharding.recompute != "none"
        if asked and any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules()):
            raise DistributedError(
                "gradient_checkpointing and fsdp_config.activation_checkpointing are both on, and mean the same",
                code="FG734",
                hint="remove one of them",
            ).about("fsdp_config")

    def build_optimizer(self) -> Optimizer:
        """Makes the optimizer of the model as it was built."""
        optimizer = self._recipe.make_optimizer(self.model)
        if isinstance(optimizer, Adafactor | torch.optim.Adafactor):
            raise DistributedError(
                "Adafactor cannot step weights that are shared or sliced: it takes means of whole ones",
                code="FG738",
                hint="take another optimizer, as optim: adamw_torch",
            ).about("optim")
        self.optimizer = optimizer
        return optimizer

    def forward_backward(
        self, window: Window, *, denom: float | Tensor, after_micro_batch: Callable[[], None] | None = None
    ) -> Tensor:
        """Adds the gradients of a window; returns this replica's share of its loss."""
        if not self.model.training:
            self.model.train()
        total = torch.zeros((), device=self.topology.device)
        last = len(window.batches) - 1
        for position, batch in enumerate(window.batches):
            loss = self._loss(to_device(batch, self.topology.device), denom)
            self.precision.scale(loss).backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
            if after_micro_batch is not None and position != last:
                after_micro_batch()
        return total

    def _loss(self, batch: Any, denom: float | Tensor) -> Tensor:
        try:
            with self.precision.autocast():
                total = self.rule.total(self.model, batch, denom=denom)
        except IndexError as error:
            tell_sizes(error, self.model, batch)
            raise
        return total / denom

    def update(
        self,
        *,
        max_norm: float,
        want_norm: bool,
        before_step: Callable[[Tensor | None], bool],
        after_step: Callable[[], None],
    ) -> Update:
        """Clips, steps and zeroes, as one act; leaves the update out where float16 gradients overflowed."""
        assert self.optimizer is not None, "build_optimizer comes first"  # noqa: S101
        # Of these each slice computed its part alone; one that no slice used stays without a gradient.
        used = [parameter for parameter in self._summed if parameter.grad is not None]
        sum_gradients(used, self.mesh.tp_group, self.topology.device)
        if self.precision.unscale(self.optimizer):
            self.discard()
            self.precision.settle()
            return Update(skipped=True)
        norm = norm_of(self._parameters) if max_norm > 0 or want_norm else None
        if norm is not None and max_norm > 0:
            clip(self._parameters, norm, max_norm)
        if before_step(norm):
            self.discard()
            self.precision.leave()
            return Update(grad_norm=norm, skipped=True)
        self.optimizer.step()
        after_step()
        self.precision.settle()
        self.discard()
        return Update(grad_norm=norm)

    def discard(self) -> None:
        """Drops the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def evaluate(self, batch: Any) -> tuple[Tensor, float | Tensor]:
        """Returns the loss sum and the number of valid targets of this replica's batch, without gradients."""
        if self.model.training:
            self.model.eval()
        with self.precision.autocast():
            total = self.rule.total(self.model, to_device(batch, self.topology.device))
        return total, self.rule.count(batch)

    def reduce(self, value: Any) -> Any:
        """Returns the sum of a value over the replicas, on every process."""
        return summed(value, self.mesh.dp_group, self.topology.device) if self.topology.dp_size > 1 else value

    def _reshard(self) -> None:
        """Frees gathered weights: a forward pass without a backward pass leaves those of the root in place."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def capture(self) -> LocalState:
        """Returns what of the state lies here."""
        self._reshard()
        optimizer = held_optimizer(self.model, self.optimizer, self.precision)
        return held_state(self.model.state_dict(keep_vars=True), optimizer, is_first=self.topology.dp_rank == 0)

    def restore(self, saved: CheckpointReader) -> None:
        """Goes on with the weights of a checkpoint; of each this process reads the part that lies here.

        Raises:
            CheckpointError: FG605, on every process, where they are those of another model.
        """
        self._reshard()
        restore_weights(class_name(self.model), self.model.state_dict(), [self.model], saved)

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Goes on with the optimizer of a checkpoint; of its state this process reads the part that lies here.

        Raises:
            CheckpointError: FG605, on every process, where it is the state of another one.
        """
        restore_optimizer(self.model, self.optimizer, saved, self.precision)

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields the state of the model by name, each weight whole, one at a time; every process iterates over it."""
        self._reshard()
        yield from whole_model_state(self.model)


def sharded(environment: DistributedEnvironment, args: Any, *, scaling: Mapping[str, Any] | None = None) -> Sharded:
    """Returns the strategy that `ParallelArguments` ask for: `fsdp`, `tensor_parallel_size`, or both.

    Args:
        environment: who this process is.
        args: the arguments.
        scaling: settings of the loss scale of float16.

    Raises:
        DistributedError: FG704 for sizes that do not make the processes, FG734 for settings that are not known.
    """
    sharding = Sharding.of(args.fsdp, args.fsdp_config) if args.fsdp or args.fsdp_config else None
    tensor = args.tensor_parallel_size
    layout = Layout.of(environment.world_size, data=args.data_parallel_size, tensor=tensor)
    if sharding is not None:
        shared = sharding.shared_by(layout.data_parallel_size, environment.local_world_size // tensor)
        layout = Layout.of(environment.world_size, data=layout.data_parallel_size, tensor=tensor, shard=shared)
    settings: dict[str, Any] = {"sharding": sharding, "tp_plan": args.tp_plan, "scaling": scaling}
    return Sharded(environment, layout, use_cpu=args.use_cpu, **settings)
