"""The strategy for FSDP2 (weights sharded over data-parallel ranks), for tensor parallelism, and for both together.

Each rank has a part of the model. The losses and updates equal those of a single process that trains on the rows of all
data-parallel ranks. Losses and gradient norms are those of the whole model, and exported weights are complete tensors.
The local state has the names and global shapes of the whole model. All ranks call the same collectives in the same
order.

The collectives are the gathering and scattering of weights by torch's `fully_shard`, the sums in `reduce`, one norm in
`update`, and one gather per tensor in `export`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from forgather.errors import DistributedError
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.distributed.mesh import Mesh
from forgather.ml.losses import is_causal_lm
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.strategy.fsdp_units import (
    EndUnits,
    checkpoint_units,
    end_units_of,
    move_buffers,
    reshard,
    shard,
    units_of,
)
from forgather.ml.strategy.gradients import clip_grads, grad_norm, share_of_squares, sum_gradients
from forgather.ml.strategy.initial_weights import make_initial_weights
from forgather.ml.strategy.model_strategy import ModelStrategy, topology_of
from forgather.ml.strategy.state import whole_model_state
from forgather.ml.strategy.tensor_parallel import apply_tensor_parallel


class Sharded(ModelStrategy):
    """The strategy for weights that are sharded over data-parallel ranks or sliced over tensor-parallel ranks.

    Args:
        environment: the rank, the world size and the process group.
        layout: the sizes of the mesh axes: the number of data-parallel ranks, of ranks that shard one replica, and of
            tensor-parallel ranks.
        sharding: the settings of FSDP2. None for the default settings; but if all ranks are tensor-parallel ranks of
            one replica, None leaves the slices unsharded.
        tp_plan: the layers that are sliced; see `tensor_parallel.apply_tensor_parallel`.
        scaling: the arguments of `torch.amp.GradScaler`, which scales the loss in float16. None for the defaults.
        use_cpu: True to compute on the CPU even if there is an accelerator.

    Raises:
        DistributedError: FG704 if the layout has pipeline stages; FG734 if `reshard_after_forward` is a number of
            ranks and there is tensor parallelism.
    """

    builds_on_meta = True  # the initial weights are read after the model was sliced and sharded
    forward_is_collective = True

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
                f"pipeline_parallel_size is {layout.pipeline_parallel_size}, and this trainer has no pipeline stages",
                code="FG704",
                hint="use the pipeline trainer: -- extends 'trainers/pipeline_trainer.yaml'",
            )
        if layout.tensor_parallel_size > 1 and sharding is not None and sharding.keeps_groups:
            raise DistributedError(
                f"fsdp_config.reshard_after_forward is {sharding.reshard_after_forward}, and torch keeps weights in "
                "groups of ranks only without tensor parallelism",
                code="FG734",
                hint="give true or false",
            ).about("fsdp_config")
        device = environment.start(use_cpu=use_cpu)
        shards = layout.shard_size * layout.context_parallel_size
        self.title = "tensor parallel" if shards == 1 else "FSDP2"
        self.layout = layout
        self.mesh = Mesh.create(layout, device.type)
        self.topology = topology_of(environment, layout, device)
        several = layout.data_parallel_size > 1 or layout.context_parallel_size > 1
        shards_by_default = several or layout.world_size == 1
        self._sharding = sharding or (Sharding() if shards_by_default else None)
        self._tp_plan = tp_plan
        self._scaling = scaling

    def build(self, recipe: Recipe) -> None:
        """Makes the model and its loss rule; slices, prepares, shards and fills the model.

        Raises:
            DistributedError: FG734 if both `gradient_checkpointing` and the FSDP2 settings request activation
                checkpointing.
        """
        self._recipe = recipe
        weights = make_initial_weights(recipe, self.topology)
        self.model = self.view = self.engine = weights.on_meta()
        self.rule = recipe.make_rule(self.model)
        self._divide_positions()
        autocast = recipe.autocast
        if self._sharding is not None:
            self._sharding, autocast = self._sharding.with_precision_of(autocast, takes_tokens=is_causal_lm(self.model))
        cut_modules: list[nn.Module] = []
        if self.mesh.layout.tensor_parallel_size > 1:
            cut_modules = apply_tensor_parallel(self.model, self.mesh.tp, self._tp_plan)
        # In this order: checkpointing must be inside compilation, and both inside the units that `fully_shard` gathers.
        units = [] if self._sharding is None else units_of(self.model, self._sharding)
        ends = EndUnits() if self._sharding is None else end_units_of(self.model, units, self._sharding)
        recomputes = self._sharding is not None and checkpoint_units(self.model, units, self._sharding)
        for step in recipe.prepare:
            step(self.model)
        if recomputes and any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules()):
            raise DistributedError(
                "gradient_checkpointing and fsdp_config.activation_checkpointing are both on, and do the same",
                code="FG734",
                hint="remove one of them",
            ).about("fsdp_config")
        if self._sharding is not None:
            shard(self.model, units, self.mesh.shards, self._sharding, ends=ends)
            if callable(getattr(self.model, "get_base_model", None)):
                # An adapter's `generate` calls the model inside, and would find the outer weights still sharded.
                register_fsdp_forward_method(self.model, "generate")
        offloads = self._sharding is not None and self._sharding.cpu_offload
        # Filled after sharding, so that each rank reads its own part only and never holds the whole model.
        weights.fill(self.model, device="cpu" if offloads else self.topology.device)
        if offloads:
            move_buffers(self.model, self.topology.device)
        # Ranks hold different gradients: an overflow on one rank counts for all.
        self._set_precision(autocast, overflow_group=dist.group.WORLD)
        self._partial_over_slices = [p for module in cut_modules for p in module.parameters() if p.requires_grad]

    def make_unset_weights(self) -> None:
        """Gives the shards their initial weights if they still wait for a checkpoint.

        Collective: every rank must call it.
        """
        self._reshard()
        super().make_unset_weights()

    def build_optimizer(self) -> Optimizer:
        """Makes and returns the optimizer of the model. It must be called after `build`.

        Raises:
            DistributedError: FG738 if the optimizer is Adafactor.
        """
        # An evaluation leaves the root's weights gathered: the optimizer would step those, and not the shards.
        self._reshard()
        optimizer = super().build_optimizer()
        if isinstance(optimizer, Adafactor | torch.optim.Adafactor):
            raise DistributedError(
                "Adafactor cannot step sharded or sliced weights: it takes means over whole weights",
                code="FG738",
                hint="use another optimizer, such as optim: adamw_torch",
            ).about("optim")
        return optimizer

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the shards and slices on this rank that the optimizer has, by their names in the whole model."""
        self._reshard()
        return super().trained_parameters()

    def _reduce_gradients(self) -> None:
        # Each slice computed a part of these gradients. A parameter that no slice used stays without a gradient.
        used = [parameter for parameter in self._partial_over_slices if parameter.grad is not None]
        sum_gradients(used, self.mesh.tp_group, self.topology.device)

    def share_of_squares(self) -> Tensor | None:
        """Returns what this rank adds to the square of the gradients' norm; see `Strategy.share_of_squares`."""
        if self.precision.scales:
            return None
        self._complete_gradients()
        return share_of_squares(self._parameters, self.mesh.replica_coordinates, self.topology.device)

    def _grad_norm(self) -> Tensor:
        return grad_norm(self._parameters)

    def _clip_gradients(self, norm: Tensor, max_norm: float) -> None:
        clip_grads(self._parameters, norm, max_norm)

    def _reshard(self) -> None:
        """Frees gathered weights, because a forward pass without a backward pass leaves the root's weights gathered."""
        reshard(self.model)

    def capture(self) -> LocalState:
        """Returns the local state: the shards and slices on this rank. Collective: every rank must call it."""
        self._reshard()
        return super().capture()

    def restore(self, saved: CheckpointReader) -> None:
        """Restores the weights of a checkpoint; this rank reads its own part of each weight.

        Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the weights of another model.
        """
        self._reshard()
        super().restore(saved)

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) for each entry in the model's state, one at a time, with sharded weights gathered.

        Collective: every rank must iterate to the end.
        """
        self._reshard()
        yield from whole_model_state(self.model)


def fsdp2_strategy(
    environment: DistributedEnvironment, args: Any, *, scaling: Mapping[str, Any] | None = None, **accelerator: Any
) -> Sharded:
    """Returns the strategy for training arguments that set `fsdp`, `tensor_parallel_size`, or both.

    Args:
        environment: the rank, the world size and the process group.
        args: the training arguments.
        scaling: the arguments of `torch.amp.GradScaler`, which scales the loss in float16.
        **accelerator: the settings `sync_each_batch` and `ddp` of the data-parallel strategy, which are ignored.

    Raises:
        DistributedError: FG704 if the product of the parallel sizes is not the number of processes; FG734 if a sharding
            setting is unknown.
    """
    sharding = Sharding.from_arguments(args.fsdp, args.fsdp_config) if args.fsdp or args.fsdp_config else None
    tensor, context = args.tensor_parallel_size, args.context_parallel_size
    layout = Layout.for_world(environment.world_size, data=args.data_parallel_size, tensor=tensor, context=context)
    if sharding is not None:
        shard_size = sharding.shard_size_among(
            layout.data_parallel_size, environment.local_world_size // (tensor * context)
        )
        layout = replace(layout, shard_size=shard_size)
    settings: dict[str, Any] = {"sharding": sharding, "tp_plan": args.tp_plan, "scaling": scaling}
    return Sharded(environment, layout, use_cpu=args.use_cpu, **settings)
