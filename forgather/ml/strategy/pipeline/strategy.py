"""The pipeline strategy: a model is cut into stages on several ranks, which run under one of torch's schedules.

The losses and updates equal those of one process. The gradients are those of the sum of losses over the rows of all
replicas, divided by the number of valid targets in all replicas. All ranks of a replica get the same rows and make the
same decisions. An input or setting that would leave one rank waiting for another is refused on all ranks first.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.modeling_layers import GenericForSequenceClassification

from forgather.errors import TrainingError
from forgather.ml.activation_checkpointing import checkpoint_activations
from forgather.ml.adapter_base import stored_state
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.save_plan import LocalState
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.distributed.mesh import Mesh
from forgather.ml.loss_path import LossPath
from forgather.ml.losses import LossRule, ModelLoss, is_causal_lm
from forgather.ml.low_bit_optim import refuse_untested
from forgather.ml.model_class import class_name
from forgather.ml.model_inputs import SHIFTED
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.strategy.fsdp_units import checkpoint_units, move_buffers, reshard, shard, units_of
from forgather.ml.strategy.gradients import GradientSums, clip_grads, grad_norm, share_of_squares, sum_gradients
from forgather.ml.strategy.initial_weights import make_initial_weights, make_unset_weights
from forgather.ml.strategy.meta_model import drop_values
from forgather.ml.strategy.model_strategy import ModelStrategy, to_device
from forgather.ml.strategy.optimizer_step import OptimizerStep
from forgather.ml.strategy.pipeline.inference import ForwardPass, PipelineModel
from forgather.ml.strategy.pipeline.local_stages import (
    LocalStages,
    optimizer_of,
    sum_tied,
    tie_local_copies,
    tied_parameters,
    tied_weights,
    whole_state,
)
from forgather.ml.strategy.pipeline.microbatch_split import part_of, step_inputs
from forgather.ml.strategy.pipeline.schedules import (
    ScheduleRunner,
    StageRNG,
    draws_random_numbers,
    facts_of,
    num_micro_batches,
    place_stages,
)
from forgather.ml.strategy.pipeline.split import SplitPlan, plan_split
from forgather.ml.strategy.pipeline.stage import blocks_of_stage, make_stage
from forgather.ml.strategy.state import local_optimizer_state, local_state, restore_weights
from forgather.ml.strategy.tensor_parallel import apply_tensor_parallel
from forgather.ml.strategy.topology import topology_of
from forgather.ml.train_mode import restored_train_modes
from forgather.ml.types import Evaluated, PaddingBatch, Window

_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


class Pipeline(ModelStrategy):
    """The strategy for a model in stages.

    The attribute `model` is the whole model on the meta device, from which classes, names and settings are taken.

    Args:
        environment: the rank, the world size and the process group.
        layout: the sizes of the mesh axes.
        rows: the number of rows of one replica in one micro-batch of the training loop, which the schedule splits
            further.
        schedule_class: the name of the schedule.
        split_spec: the cuts of the model; see `plan_split`.
        pipeline_chunks: the number of micro-batches that the rows are split into. None for as many as there are stages,
            if the rows allow it.
        stages_per_rank: the number of stages on one rank. None to derive it from the cuts or from the schedule.
        checkpoint_sequential: True to recompute the activations of each block in the backward pass.
        sharding: the settings of FSDP2 over the replicas. None to replicate the weights and sum their gradients in each
            optimizer step. Gathered weights stay gathered until the end of a step, whatever the value of
            `reshard_after_forward` is.
        tp_plan: the layers that are sliced; see `tensor_parallel.apply_tensor_parallel`.
        overlap_grad_reduce: True to sum the gradients of a stage over replicas as soon as its last backward pass has
            ended, while other stages of the rank compute. False to sum all gradients after the backward passes.
        use_cpu: True to compute on the CPU even if there is an accelerator.

    Raises:
        DistributedError: FG760 if schedule, stages and ranks do not fit together, FG761 if the schedule or the rows do
            not allow the number of micro-batches.
    """

    builds_on_meta = True  # the initial weights are read after the model was cut

    def __init__(
        self,
        environment: DistributedEnvironment,
        layout: Layout,
        *,
        rows: int,
        schedule_class: str = "ScheduleGPipe",
        split_spec: Mapping[str, Any] | str | int | None = None,
        pipeline_chunks: int | None = None,
        stages_per_rank: int | None = None,
        checkpoint_sequential: bool = False,
        sharding: Sharding | None = None,
        tp_plan: str | Mapping[str, Any] | None = None,
        overlap_grad_reduce: bool = True,
        use_cpu: bool = False,
    ) -> None:
        self.schedule = self.title = schedule_class
        self.split_spec = split_spec
        self.checkpoint_sequential = checkpoint_sequential
        # Schedules that split the backward pass lose gradients silently if weights are gathered again within a step.
        self._sharding = None if sharding is None else dataclasses.replace(sharding, reshard_after_forward=False)
        self._tp_plan = tp_plan
        # Before the process group is started, so that every rank refuses sizes that do not fit.
        self.placement = place_stages(
            schedule_class,
            layout.pipeline_parallel_size,
            stages_per_rank=stages_per_rank,
            num_stages=_stages_asked(split_spec),
        )
        self.parts = num_micro_batches(schedule_class, self.placement, rows, pipeline_chunks)
        device = environment.start(use_cpu=use_cpu)
        self.layout = layout
        self.mesh = Mesh.create(layout, device.type)
        position = self.mesh.position
        replicated = self._sharding is None and layout.data_parallel_size > 1
        overlaps = replicated and overlap_grad_reduce
        self._sums = GradientSums(self.mesh.dp_group, device) if overlaps else None
        self._share_group = self.mesh.stages_and_replicas()
        self.topology = topology_of(
            environment,
            layout,
            device,
            has_loss=position.pipeline == self.placement.last_rank,
            pp_rank=position.pipeline,
            fixed_rows=True,
        )

    # -- build ---------------------------------------------------------------------------------------------------------

    def build(self, recipe: Recipe) -> None:
        """Makes the stages on this rank and the loss rule; fills the stages and applies the recipe's `prepare` steps.

        Raises:
            TrainingError: FG750 to FG755 if the model cannot be cut, FG762 if the loss needs the whole model, FG763 if
                a stage has no trainable weight and the schedule splits backward passes, FG767 if `fp16` is on.
        """
        if recipe.autocast is torch.float16:
            raise TrainingError(
                "fp16 is on, and a pipeline does not scale float16 losses",
                code="FG767",
                hint="set bf16: true, which has the range of float32",
            )
        self._recipe = recipe
        initial = make_initial_weights(recipe, self.topology)
        skeleton = initial.on_meta()
        autocast = recipe.autocast
        if self._sharding is not None:
            self._sharding, autocast = self._sharding.with_precision_of(autocast, takes_tokens=is_causal_lm(skeleton))
        self.rule = recipe.make_rule(skeleton)
        _refuse_loss_of_the_model(skeleton, self.rule)
        plan = plan_split(skeleton, self.split_spec, self.placement.num_stages)
        self.plan = plan
        self._state_names = list(skeleton.state_dict())
        self._refuse_frozen_stages(skeleton, plan)
        self.model = skeleton
        summed: set[str] = set()
        if self.mesh.layout.tensor_parallel_size > 1:
            # `self.model` is not sliced: it gives classes, names and settings of the whole model.
            skeleton = copy.deepcopy(skeleton)
            cut = {id(module) for module in apply_tensor_parallel(skeleton, self.mesh.tp, self._tp_plan)}
            summed = {name for name, module in skeleton.named_modules() if id(module) in cut}
        stages = {}
        for index in self.placement.stages_of(self.topology.pp_rank):
            stage = stages[index] = make_stage(skeleton, plan, index)
            self._prepare(stage)
            offloads = self._sharding is not None and self._sharding.cpu_offload
            initial.fill(stage, device="cpu" if offloads else self.topology.device)
            move_buffers(stage, self.topology.device)
        self._join_stages(skeleton, plan, stages)
        self._set_precision(autocast)
        self._partial_over_slices = [
            parameter
            for index, stage in stages.items()
            for name in summed
            if plan.holds(index, name)
            for parameter in stage.get_submodule(name).parameters()
            if parameter.requires_grad
        ]
        self._rng = StageRNG(
            replica=self.topology.dp_rank,
            position=self.topology.pp_rank,
            draws=draws_random_numbers(skeleton, getattr(skeleton, "config", None)),
        )
        shared: dict[str, Any] = {"placement": self.placement, "group": self.mesh.pp_group}
        self._runner = ScheduleRunner(
            stages, schedule=self.schedule, parts=self.parts, device=self.topology.device, **shared
        )
        self._forward = ForwardPass(stages, device=self.topology.device, **shared)
        self.view = PipelineModel(self._local, self._forward, skeleton)

    def _prepare(self, stage: nn.Module) -> None:
        """Applies activation checkpointing, compilation and sharding to a stage on the meta device."""
        units = [] if self._sharding is None else units_of(stage, self._sharding)
        if self.checkpoint_sequential:
            checkpoint_activations(blocks_of_stage(stage).values(), "full")
        elif self._sharding is not None:
            checkpoint_units(stage, units, self._sharding)
        # A forward pass leaves a stage by an exception, which no compiler can trace: each block is compiled by itself.
        stage.compile = functools.partial(_compile_blocks, stage)  # type: ignore[method-assign]
        for step in self._recipe.prepare:
            step(stage)
        if self._sharding is not None:
            shard(stage, units, self.mesh.shards, self._sharding)

    def _join_stages(self, skeleton: nn.Module, plan: SplitPlan, stages: dict[int, nn.Module]) -> None:
        drop_values(self.model, stages.values())
        tied = tied_parameters(skeleton, plan)
        if self._sharding is None:
            tie_local_copies(stages, tied)
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for name, parameter in skeleton.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                aliases[name] = first[id(parameter)]
        self._tied, self._counted_elsewhere = tied_weights(stages, tied, self.placement, self.mesh.pp_group)
        self._local = self.engine = LocalStages(stages, aliases, getattr(skeleton, "config", None))

    def _refuse_frozen_stages(self, skeleton: nn.Module, plan: SplitPlan) -> None:
        if not facts_of(self.schedule).splits_backward:
            return
        # After a frozen stage torch leaves gradients of the next stage out under these schedules, without a message.
        trains = [name for name, parameter in skeleton.named_parameters() if parameter.requires_grad]
        frozen = [index for index in range(plan.num_stages) if not any(plan.holds(index, name) for name in trains)]
        if frozen and trains:
            raise TrainingError(
                f"stage{'s' if len(frozen) > 1 else ''} {', '.join(map(str, frozen))} of {plan.num_stages} "
                f"ha{'ve' if len(frozen) > 1 else 's'} no trainable weight, and {self.schedule} then loses gradients",
                code="FG763",
                hint="use Schedule1F1B or ScheduleInterleaved1F1B, or train a weight in every stage",
            )

    @property
    def local(self) -> LocalStages:
        """The stages on this rank, as one module."""
        return self._local

    def make_unset_weights(self) -> None:
        """Gives the stages their initial weights if they still wait for a checkpoint.

        Collective: every rank must call it.
        """
        make_unset_weights(self.model, self._recipe, self.topology, parts=list(self._local.stages.values()))

    def build_optimizer(self) -> Optimizer:
        """Makes and returns the optimizer of the stages on this rank.

        Raises:
            DistributedError: FG708 if it is an optimizer of torchao.
        """
        self.optimizer = optimizer_of(self._local, self._recipe.make_optimizer)
        refuse_untested(self.optimizer, "in the stages of a pipeline")
        self._step = OptimizerStep(self.optimizer)
        return self.optimizer

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters of the stages here that the optimizer has, by their names in the whole model."""
        reshard(self._local)
        return super().trained_parameters()

    # -- one update ----------------------------------------------------------------------------------------------------

    def _settle_loss_path(self, window: Window) -> None:
        path: LossPath | None = getattr(self.rule, "path", None)
        if path is None or not path.is_undecided:
            return
        super()._settle_loss_path(window)
        if self.topology.has_loss:
            last = self._local.stages[str(self.placement.num_stages - 1)]
            path.runs_backward_twice = facts_of(self.schedule).splits_backward
            last.loss_path = path  # type: ignore[assignment]

    def _micro_step(self, batch: Any, denom: float | Tensor, *, is_last: bool) -> Tensor | None:
        inputs = step_inputs(batch)
        size = self._rows_of_a_part(inputs.rows)
        targets = self._targets_without_logits(batch, size)
        if targets is not None:
            inputs.every[SHIFTED] = targets

        def loss(output: Any, index: int) -> Tensor:
            part = part_of(batch, index, size)
            if targets is not None:
                total: Tensor = output.sum()
                return (total * 0.0 if isinstance(part, PaddingBatch) else total) / denom
            return self.rule.total(lambda *args, **kwargs: output, part, denom=denom) / denom

        with self.precision.autocast(), self._rng.isolated(), self._saving():
            after_stage = self._sum_stage if is_last and self._sums is not None else None
            self._unfinished = set(self._runner.stages)
            return self._runner.run(inputs, loss, after_stage=after_stage)

    def _sum_stage(self, index: int) -> None:
        """Starts to sum over replicas the gradients that no further backward pass of the step changes."""
        assert self._sums is not None, "called only then"  # noqa: S101
        self._unfinished.remove(index)
        stages = self._runner.stages
        # A tied weight may be in two stages of this rank.
        later = {parameter for other in self._unfinished for parameter in stages[other].parameters()}
        self._sums.start(parameter for parameter in stages[index].parameters() if parameter not in later)

    def _targets_without_logits(self, batch: Any, rows_of_a_part: int) -> Tensor | None:
        """Returns the targets of a batch if the last stage, on this rank, computes the loss without logits.

        Shapes:
            Returns (B, T).
        """
        path: LossPath | None = getattr(self.rule, "path", None)
        batch = batch.batch if isinstance(batch, PaddingBatch) else batch
        targets = batch.get(SHIFTED) if path is not None and isinstance(batch, Mapping) else None
        if path is None or not isinstance(targets, Tensor) or not path.takes(targets[:rows_of_a_part]):
            return None
        return targets

    def _rows_of_a_part(self, rows: int) -> int:
        size, rest = divmod(rows, self.parts)
        if rest:
            # Raises FG761 with the numbers that would work.
            num_micro_batches(self.schedule, self.placement, rows, self.parts)
        return size

    def _reduce_gradients(self) -> None:
        # First of all, since the sums over replicas write into the gradients until they have ended.
        summed = set() if self._sums is None else self._sums.finish()
        if self._sharding is None and self.topology.dp_size > 1:
            rest = [parameter for parameter in self._parameters if parameter not in summed]
            sum_gradients(rest, self.mesh.dp_group, self.topology.device)
        if self._partial_over_slices:
            sum_gradients(self._partial_over_slices, self.mesh.tp_group, self.topology.device)
        sum_tied(self._tied, rank=self.topology.pp_rank, group=self.mesh.pp_group, device=self.topology.device)

    def share_of_squares(self) -> Tensor | None:
        """Returns what this rank adds to the square of the gradients' norm; see `Strategy.share_of_squares`."""
        self._complete_gradients()
        return share_of_squares(
            self._parameters,
            self.mesh.replica_coordinates,
            self.topology.device,
            weights_counted_once=self._counted_elsewhere,
        )

    def discard(self) -> None:
        """Drops the gradients, after all sums of them have ended."""
        if self._sums is not None:
            self._sums.finish()
        super().discard()

    def _grad_norm(self) -> Tensor:
        return grad_norm(self._parameters, pp_group=self.mesh.pp_group, weights_counted_once=self._counted_elsewhere)

    def _clip_gradients(self, norm: Tensor, max_norm: float) -> None:
        clip_grads(self._parameters, norm, max_norm)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Evaluated:
        """Returns the loss sum of a batch, the number of its valid targets, and the model's output.

        On a rank that does not have the last stage, the loss sum is zero and the output is None.
        """
        placed = to_device(batch, self.topology.device)
        output = self.predict(placed)
        num_valid = self.rule.count(batch)
        if output is None:
            return Evaluated(torch.zeros((), device=self.topology.device), num_valid, None)
        with self.precision.autocast():
            total, shown = self.rule.total_and_output(lambda *args, **kwargs: output, placed)
        return Evaluated(total, num_valid, shown)

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:
        """Returns the model's output for a batch, which may have no labels, on the ranks that have the last stage.

        Shapes:
            Returns the model's output.
        """
        with restored_train_modes(self._local), self.precision.autocast():
            self._local.eval()
            return self._forward(step_inputs(to_device(batch, self.topology.device)))

    def reduce(self, value: Any) -> Any:
        """Returns, on every rank, the sum of a value over replicas and stages.

        Values of ranks that do not have the last stage are treated as zero.

        Args:
            value: a number or a tensor.

        Shapes:
            value: any shape. Returns the same shape.
        """
        is_tensor = isinstance(value, Tensor)
        whole = value.dtype in _WHOLE_NUMBERS if is_tensor else isinstance(value, int)
        # One dtype on every rank: those without a loss do not know in which dtype it was computed.
        kind = torch.int64 if whole else torch.float32 if self.topology.device.type == "mps" else torch.float64
        there = torch.as_tensor(value).detach().to(self.topology.device, kind, copy=True)
        if not self.topology.has_loss:
            there.zero_()
        dist.all_reduce(there, group=self._share_group)
        return there if is_tensor else there.item()

    # -- state ---------------------------------------------------------------------------------------------------------

    def capture(self) -> LocalState:
        """Returns the local state, which is that of the stages on this rank. Collective: every rank must call it."""
        return local_state(
            stored_state(self.model, self._local.named_state()),
            local_optimizer_state(self._local, self.optimizer),
            is_first=self.topology.dp_rank == 0,
            aliases=stored_state(self.model, self._local.aliases),
        )

    def restore(self, saved: CheckpointReader) -> None:
        """Restores the weights of a checkpoint; this rank reads the weights of its stages.

        Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the weights of another model.
        """
        stages = list(self._local.stages.values())
        restore_weights(self.model, self._state_names, stages, saved)

    def export(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) for each entry in the whole model's state, one at a time, with sharded weights gathered.

        Collective: every rank must iterate to the end.
        """
        yield from whole_state(self._local, self._state_names, group=self.mesh.pp_group, device=self.topology.device)


def pipeline_strategy(environment: DistributedEnvironment, args: Any) -> Pipeline:
    """Returns the strategy for `PipelineTrainingArguments`.

    Args:
        environment: the rank, the world size and the process group.
        args: the training arguments.

    Raises:
        DistributedError: FG704 if the product of the data-parallel, pipeline-parallel and tensor-parallel sizes is not
            the number of processes; FG760 or FG761 if the number of stages or micro-batches does not fit the schedule.
    """
    layout = Layout.for_world(
        environment.world_size,
        data=args.data_parallel_size,
        pipeline=args.pipeline_parallel_size,
        tensor=args.tensor_parallel_size,
    )
    sharding = Sharding.from_arguments(args.fsdp, args.fsdp_config) if args.fsdp else None
    if sharding is not None and sharding.strategy != "NO_SHARD":
        replicas = environment.local_world_size // args.tensor_parallel_size
        shard_size = sharding.shard_size_among(layout.data_parallel_size, replicas)
        layout = dataclasses.replace(layout, shard_size=shard_size)
    else:
        # `Pipeline` itself sums the gradients of replicated weights.
        sharding = None
    return Pipeline(
        environment,
        layout,
        rows=args.per_device_train_batch_size,
        schedule_class=args.schedule_class,
        split_spec=args.split_spec,
        pipeline_chunks=args.pipeline_chunks,
        stages_per_rank=args.stages_per_rank,
        checkpoint_sequential=args.checkpoint_sequential,
        sharding=sharding,
        tp_plan=args.tp_plan,
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_cpu=args.use_cpu,
    )


def _stages_asked(split_spec: Any) -> int | None:
    """Returns the number of stages that a `split_spec` determines, or None if it does not determine one."""
    if isinstance(split_spec, Mapping):
        return len(split_spec) + 1
    return split_spec if isinstance(split_spec, int) and not isinstance(split_spec, bool) else None


def _compile_blocks(stage: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compiles each block of a stage separately, in place."""
    for block in blocks_of_stage(stage).values():
        block.compile(*args, **kwargs)


def _refuse_loss_of_the_model(model: nn.Module, rule: LossRule) -> None:
    kind = class_name(model)
    if isinstance(rule, ModelLoss):
        raise TrainingError(
            f"{kind} computes its loss itself, and no pipeline stage holds the whole model",
            code="FG762",
            # A stage gets one input, and the decoder of such a model takes the output of the encoder and the labels.
            hint="train it with trainers/trainer.yaml or trainers/accel_trainer.yaml"
            if getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            else "return logits from the model, and give the trainer a loss_fn of (logits, labels)",
        )
    if isinstance(model, GenericForSequenceClassification):
        # The last stage would take the last position of a padded batch instead, without a message.
        raise TrainingError(
            f"{kind} finds the last token of a row by the token ids, which the last pipeline stage does not get",
            code="FG762",
            hint="train it with trainers/trainer.yaml or trainers/accel_trainer.yaml",
        )
    config: Any = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0):
        raise TrainingError(
            f"{kind} adds a loss of its routers (output_router_logits), which pipeline stages do not pass on",
            code="FG762",
            hint="set output_router_logits: false in the model's configuration",
        )
