"""What a trace tells about a run besides its memory and its work: strategy, sizes, settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from forgather.ml.model_inputs import max_positions
from forgather.ml.planner.extrapolation import extrapolated_counts, line
from forgather.ml.planner.stage_parts import StageParts, parts_of
from forgather.ml.planner.stored_state import StoredState, state_of
from forgather.ml.strategy.describe import axes_of
from forgather.ml.strategy.pipeline.local_stages import LocalStages
from forgather.ml.trainer.run_start import num_steps_and_epochs
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.types import Window

SETTINGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "activation_memory_budget",
    "bf16",
    "fp16",
    "async_save",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "save_only_model",
    "max_steps",
    "dataloader_num_workers",
    "initial_weights",
)
"""The settings that a plan repeats: they decide what can make a run smaller, and what it stores."""


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """What a trace tells about the run besides its memory.

    Args:
        strategy: the name of the strategy class.
        mesh: the size of each mesh axis, by name.
        parameters: the number of elements of the model on this rank, as if nothing were sharded.
        trainable: the number of those that are trained.
        rows_per_update: the number of rows of one optimizer step, over all data-parallel ranks; where the accumulation
            changes, of the largest one.
        mean_rows_per_update: the mean number of rows of the steps of the run.
        tokens_per_row: the number of tokens of a row of the traced batch; None if rows have no token ids.
        num_pipeline_ranks: the number of ranks of one pipeline.
        stages: the numbers of the pipeline stages on this rank; empty without a pipeline.
        num_updates: the number of optimizer steps of the run.
        schedule: the name of the pipeline schedule; None without a pipeline.
        micro_batches: the number of micro-batches that one run of the schedule passes through the pipeline.
        schedule_runs: the number of runs of the schedule in an optimizer step, or the mean.
        reduced_bytes: the bytes of the gradients that DDP sums in a step, which no operator shows.
        untraced: the bytes of what no operator allocates, by its use, such as the buckets of DDP.
        stored: the weights and the optimizer state of this rank, as if nothing were sharded.
        gathered_bytes: the bytes of the largest weight that is gathered from other ranks when the model is saved.
        settings: the settings of `SETTINGS`, as the trainer has them.
        notes: what the trace leaves out, one sentence each.
        parts: the parts of the model in pipeline stages; None without a pipeline.
        max_positions: the largest number of tokens of a row for which the model has positions; None if no number is
            certain.
        convolution_bytes: the bytes of the arguments and results of the largest convolution on a GPU.
        most_rows: the largest number of rows of a micro-batch for which the data suffices; None for a stream.
        document_length: the length of the document of a token, see `RunWork`.
    """

    strategy: str
    mesh: Mapping[str, int]
    parameters: int
    trainable: int
    rows_per_update: int
    mean_rows_per_update: float
    tokens_per_row: int | None
    num_pipeline_ranks: int
    stages: tuple[int, ...]
    num_updates: int
    schedule: str | None
    micro_batches: int
    schedule_runs: float
    reduced_bytes: int
    untraced: Mapping[str, int]
    stored: StoredState
    gathered_bytes: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    parts: StageParts | None = None
    max_positions: int | None = None
    convolution_bytes: int = 0
    most_rows: int | None = None
    document_length: float | None = None

    def at_depth(self, deeper: TraceFacts, num_blocks: int) -> TraceFacts:
        """Returns the facts of a model with more blocks, on the line through the two depths that are traced."""
        return replace(
            self,
            parameters=line(self.parameters, deeper.parameters, num_blocks),
            trainable=line(self.trainable, deeper.trainable, num_blocks),
            reduced_bytes=line(self.reduced_bytes, deeper.reduced_bytes, num_blocks),
            untraced=extrapolated_counts(self.untraced, deeper.untraced, num_blocks),
            stored=self.stored.at_depth(deeper.stored, num_blocks),
        )


def facts_of(
    trainer: Trainer, window: Window, local: nn.Module, notes: Iterable[str], convolution_bytes: int = 0
) -> TraceFacts:
    """Returns the facts of a trace.

    Args:
        trainer: the trainer, after a step.
        window: the window that was traced.
        local: the part of the model on this rank.
        notes: what the trace leaves out, one sentence each; what follows from the trainer is added.
        convolution_bytes: see `TraceFacts`.
    """
    strategy, args = trainer.strategy, trainer.args
    sizes = _sizes(local)
    ids = next((item for item in tree_iter(window.batches) if isinstance(item, Tensor) and item.dim() == 2), None)
    layout = strategy.layout
    steps, _ = num_steps_and_epochs(args, trainer._train_batches())
    rows, mean = args.per_device_train_batch_size * layout.data_parallel_size, mean_accumulation(trainer)
    if args.accumulation.changes:
        notes = [
            *notes,
            f"the memory is that of the largest step, of {rows * args.accumulation.largest:,} rows; times "
            f"are those of the mean step, of {rows * mean:,.1f} rows",
        ]
    if args.torch_compile:
        said = (
            "torch_compile is not modelled: compiled code keeps fewer temporaries (a plan was 16 % above one such run)"
        )
        notes = [*notes, said]
        if args.activation_memory_budget is not None:
            budget = args.activation_memory_budget
            said = f"activation_memory_budget {budget}: the plan is that of blocks that keep all activations"
            notes = [*notes, said]
    stored = state_of(strategy)
    shares_no_weight = layout.data_parallel_size == strategy.topology.world_size
    is_whole = shares_no_weight and not getattr(strategy, "forward_is_collective", True)
    return TraceFacts(
        strategy=type(strategy).__name__,
        mesh=axes_of(strategy),
        parameters=sum(size for size, _ in sizes),
        trainable=sum(size for size, trains in sizes if trains),
        rows_per_update=rows * args.accumulation.largest,
        mean_rows_per_update=rows * mean,
        tokens_per_row=None if ids is None else int(ids.shape[1]),
        num_pipeline_ranks=layout.pipeline_parallel_size,
        stages=_stages(strategy),
        num_updates=steps,
        schedule=getattr(strategy, "schedule", None),
        micro_batches=getattr(strategy, "parts", 1),
        schedule_runs=mean,
        reduced_bytes=_reduced_bytes(strategy),
        untraced=_untraced(strategy),
        stored=stored,
        gathered_bytes=0 if is_whole else max(stored.model.values(), default=0),
        settings={name: getattr(args, name, None) for name in SETTINGS},
        notes=tuple(notes),
        parts=parts_of(strategy),
        max_positions=max_positions(strategy.model),
        convolution_bytes=convolution_bytes,
    )


def mean_accumulation(trainer: Trainer) -> float:
    """Returns the mean number of micro-batches of the steps of a run; without a schedule, their constant number."""
    data = trainer._train_batches()
    if not data.accumulation.changes:
        return data.accumulation.largest
    steps, _ = num_steps_and_epochs(trainer.args, data)
    return data.accumulation.num_micro_batches(steps, data.num_batches) / max(1, steps)


def _sizes(local: nn.Module) -> list[tuple[int, bool]]:
    """Returns the number of elements of each weight, and whether it is trained. A tied weight counts once."""
    aliases = getattr(local, "aliases", {})
    parts = local.stages.children() if isinstance(local, LocalStages) else [local]
    weights = {id(item): item for part in parts for name, item in part.named_parameters() if name not in aliases}
    # At stage 3, DeepSpeed leaves weights empty while nothing computes with them.
    return [(getattr(weight, "ds_numel", weight.numel()), weight.requires_grad) for weight in weights.values()]


def _stages(strategy: Any) -> tuple[int, ...]:
    placement = getattr(strategy, "placement", None)
    if placement is None:
        return ()
    return tuple(placement.stages_of(strategy.layout.position(strategy.topology.rank).pipeline))


def _untraced(strategy: Any) -> dict[str, int]:
    """Returns the bytes of the buckets of DDP, in which it sums gradients: as many as the gradients."""
    reduced = _reduced_bytes(strategy)
    return {"buckets": reduced} if reduced else {}


def has_bucket_views(strategy: Any, window: Window) -> bool:
    """Returns whether all gradients of a step are views of the buckets of DDP.

    DDP copies each gradient to its bucket. Of several micro-batches, only the last one does.

    Args:
        strategy: the strategy of the run.
        window: the micro-batches of the step.
    """
    return bool(len(window.batches) == 1 and _reduced_bytes(strategy) and strategy.gradients_are_views)


def _reduced_bytes(strategy: Any) -> int:
    if not hasattr(strategy, "gradients_are_views") or strategy.topology.world_size == 1:
        return 0
    trained = [weight for weight in strategy.model.parameters() if weight.requires_grad]
    return sum(weight.numel() * weight.element_size() for weight in trained)
