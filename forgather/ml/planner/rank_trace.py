"""The memory of one rank in one training step and one evaluation, traced without memory and without other processes.

`trace_rank` takes a function that makes the trainer, and a position. It builds the trainer with fake weights, which
have shapes and no values, under a fake process group, lets the trainer's own strategy compute two steps, and records
the second one: the first makes the optimizer's state. Nothing here imitates a step; what is traced is what runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_iter

from forgather.launcher_env import ProcessFacts
from forgather.ml.activation_checkpointing import repeated_blocks
from forgather.ml.distributed.env import fake_world
from forgather.ml.planner.allocations import Allocation, Peak, Region, peaks
from forgather.ml.planner.engine_tensors import engine_gradients, hold_engine, is_engine_bucket, separate_engine
from forgather.ml.planner.extrapolation import block_list, shorten
from forgather.ml.planner.generation_trace import GENERATION, generate
from forgather.ml.planner.library_kernels import kernel_notes
from forgather.ml.planner.model_builders import building, loading_fakes, without_memory_for_models
from forgather.ml.planner.operations import WorkCounter
from forgather.ml.planner.packed_weights import other_models, parts_of
from forgather.ml.planner.places import BEFORE, Places, noting_width
from forgather.ml.planner.planned_batches import PlannedBatches, planned_batches
from forgather.ml.planner.rank_recorder import COMMUNICATION, TEMPORARIES, RankRecorder, use_of_message
from forgather.ml.planner.real_integers import RealIntegers
from forgather.ml.planner.stage_metadata import Relay, relayed
from forgather.ml.planner.trace_facts import TraceFacts, facts_of, mean_accumulation
from forgather.ml.planner.untraceable import formula_sizes, has_formula, untraceable
from forgather.ml.planner.value_readings import ReadingZeros, keep_loss_scale, living_tensors
from forgather.ml.planner.window_shape import WindowShape, reshaped
from forgather.ml.strategy.base import Recipe, Strategy, build_strategy
from forgather.ml.strategy.initial_weights import fill_with_fakes, shapes_only
from forgather.ml.strategy.meta_model import move_to_meta
from forgather.ml.trainer.divergence import window_with_divergence
from forgather.ml.trainer.loop import loss_divisor
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.types import Window
from forgather.planner.work import Message, Operation

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, LOGITS, BATCH = "activations", "logits", "batch"
OTHER_MODELS = "other models"
BUCKETS = "buckets"
CACHE = "cache of keys and values"


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What a rank holds in a training step and an evaluation.

    Args:
        num_blocks: the number of repeated blocks of the model on this rank.
        peaks: the peak of each region of the step.
        allocations: all allocations, in the order of their birth.
        facts: the sizes of the run.
        operations: the number of operators that do the same work, in one step with all its micro-batches, and in one
            evaluation.
        messages: the number of equal messages to other ranks, in the same.
        block_operations: the same operators in a pipeline, by the index of the block; empty without a pipeline.
        repeated: the operations and messages of one micro-batch that is not the last one; empty if there is only one.
        whole: the number of blocks before the model was shortened; None if it was not.
    """

    num_blocks: int
    peaks: Mapping[Region, Peak]
    allocations: tuple[Allocation, ...]
    facts: TraceFacts
    operations: Mapping[Operation, float]
    messages: Mapping[Message, float]
    block_operations: Mapping[tuple[int, Operation], float] = field(default_factory=dict)
    repeated: Mapping[Operation | Message, int] = field(default_factory=dict)
    whole: int | None = None

    @property
    def peak(self) -> tuple[Region, Peak]:
        """The region of the largest sum of bytes, and its peak."""
        return max(self.peaks.items(), key=lambda item: item[1].num_bytes)


Constructor = Callable[..., Any]
MakeTrainer = Callable[[Callable[[Constructor], Constructor]], Any]


def trace_rank(
    make_trainer: MakeTrainer,
    facts: ProcessFacts,
    *,
    depth: int | None = None,
    relay: Relay | None = None,
    device_type: str = "cpu",
) -> RankTrace:
    """Returns the trace of one rank, with the longest rows. For the arguments and errors see `trace_shapes`."""
    return trace_shapes(make_trainer, facts, (WindowShape(),), depth=depth, relay=relay, device_type=device_type)[0]


def trace_shapes(
    make_trainer: MakeTrainer,
    facts: ProcessFacts,
    shapes: Sequence[WindowShape],
    *,
    depth: int | None = None,
    relay: Relay | None = None,
    device_type: str = "cpu",
) -> list[RankTrace]:
    """Returns the traces of one rank for several sizes of its window, of one trainer that is built once.

    Args:
        make_trainer: a function that returns the trainer of the config. Its argument is a function that must be called
            with each constructor, and whose result is called in place of the constructor.
        facts: the position of the rank among the processes.
        shapes: the sizes of the window of each trace.
        depth: the number of blocks to which the model is shortened; None traces all of them. A model without a single
            list of equal blocks is never shortened, nor one that is cut into pipeline stages.
        relay: the messages between pipeline stages about shapes; None without a pipeline.
        device_type: the kind of device that is planned for, "cpu" or "cuda". Tensors of a trace are on the CPU in any
            case; optimizers of torch take another path on a GPU, and gloo, which sends between CPUs, copies messages.

    Returns:
        A trace for each size; for a pipeline only the first one, because its stages are made for one size.

    Raises:
        PlanError: FG997 if `shapes` has other rows, and the tensors of a batch have no common number of rows.
        UntraceableModel: FG962 if the forward pass of the model reads values of tensors; with traces by formula if
            the model was not to be shortened.
        Exception: if the code of the model does not fit its settings.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    sizes: list[int] = []

    token = build_strategy.set(functools.partial(_build, fake=fake, depth=depth, sizes=sizes))
    try:
        stages = contextlib.nullcontext() if relay is None else relayed(relay)
        world = contextlib.nullcontext() if facts.world_size == 1 else fake_world(facts)
        with world, separate_engine(), shapes_only(), loading_fakes(), stages:
            trainer = make_trainer(lambda function: without_memory_for_models(function, fake))
            batches = planned_batches(trainer)
            with fake, RealIntegers():  # type: ignore[no-untyped-call]
                with ReadingZeros(trainer.strategy.model):
                    trainer.strategy.build_optimizer()
                if device_type != "cpu":
                    choose_foreach(trainer.strategy.optimizer)
                keep_loss_scale(getattr(trainer.strategy, "precision", None))
                whole = sizes[0] if sizes else None
                if trainer.strategy.layout.pipeline_parallel_size > 1:
                    shapes = shapes[:1]
                traced = _traces(trainer, batches, shapes, fake, device_type)
                with _naming_readings(trainer, batches, shapes, has_whole_model=depth is None):
                    return [replace(trace, whole=whole) for trace in traced]
    finally:
        build_strategy.reset(token)
        # Accelerate keeps the state of this strategy until the Python process ends.
        AcceleratorState._reset_state(reset_partial_state=True)


def _build(strategy: Strategy, recipe: Recipe, *, fake: FakeTensorMode, depth: int | None, sizes: list[int]) -> None:
    """Builds a strategy whose model is fake and shortened to a depth; for `sizes` see `_faked`."""
    # The stages of a pipeline are cut at the names of blocks.
    is_whole = strategy.layout.pipeline_parallel_size == 1
    make_fake = functools.partial(
        _faked, recipe.make_model, strategy.topology.device, sizes, depth if is_whole else None
    )
    # The strategy also makes meshes, whose ranks are real.
    with building(fake):
        strategy.build(replace(recipe, make_model=make_fake, prepare=_without_compile(recipe)))


def _faked(make_model: Callable[[], nn.Module], device: torch.device, sizes: list[int], depth: int | None) -> nn.Module:
    """Returns the model with fake tensors on a device; adds the number of its blocks to `sizes` if it shortens it."""
    model = make_model()
    if depth is not None and (blocks := block_list(model)) is not None:
        sizes.append(len(blocks))
        shorten(model, depth)
    if any(not isinstance(item, FakeTensor) or item.device != device for item in model.parameters()):
        # The config built the model before the trace began, or its constructor reads values.
        move_to_meta(model)
        fill_with_fakes(model, device)
    return model


def _without_compile(recipe: Recipe) -> list[Callable[[nn.Module], None]]:
    return [step for step in recipe.prepare if getattr(getattr(step, "func", step), "__name__", "") != "compile_model"]


def choose_foreach(optimizer: Any) -> None:
    """Makes an optimizer of torch compute as it does on a GPU: all weights at once, unless it was told otherwise.

    Args:
        optimizer: the optimizer, or a wrapper with its parameter groups.

    Source:
        `torch.optim.optimizer._default_to_fused_or_foreach`, which is false for tensors on a CPU and for fake ones.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused") and not group["differentiable"]:
            group["foreach"] = True


def _traces(
    trainer: Trainer, planned: PlannedBatches, shapes: Iterable[WindowShape], fake: FakeTensorMode, device_type: str
) -> Iterator[RankTrace]:
    strategy: Any = trainer.strategy
    local: nn.Module = getattr(strategy, "local", strategy.model)
    blocks = _blocks(local)
    places = Places(blocks)
    widths: list[int] = []

    def categorize(allocation: Allocation) -> str | None:
        if allocation.category is not None:
            return allocation.category
        if (use := use_of_message(allocation.operation)) is not None:
            return use
        if is_engine_bucket(strategy, allocation):
            return BUCKETS
        is_output = allocation.region.block == len(blocks) and allocation.shape[-1:] == tuple(widths)
        if is_output and allocation.region.phase in ("forward", "backward", "evaluation", GENERATION):
            return LOGITS
        if allocation.region.phase == GENERATION and allocation.operation == "aten.cat" and len(allocation.shape) == 4:
            # A cache grows by a copy of the keys and of the values of a block.
            return CACHE
        if allocation.region.phase in ("forward", "evaluation", GENERATION) or places.recomputes:
            return ACTIVATIONS
        return TEMPORARIES

    with places.followed(), noting_width(local, blocks, widths), ReadingZeros(local):
        traced: dict[Any, RankTrace] = {}
        for shape in shapes:
            sized = reshaped(planned.longest if shape.longest else planned.first, shape)
            steps = shape.micro_batches or mean_accumulation(trainer)
            sizes = steps, tuple(item.shape for item in tree_iter(sized.batches) if isinstance(item, Tensor))
            if sizes not in traced:
                # The first step makes the optimizer's state. The first one of a size fills the caches of DTensor, which
                # sees other sizes for other rows only where layers are divided.
                if not traced or strategy.layout.tensor_parallel_size > 1:
                    _step(trainer, sized, places, WorkCounter(places.work_phase))
                traced[sizes] = _traced(trainer, sized, steps, planned, places, fake, categorize, device_type)
            yield traced[sizes]


@contextlib.contextmanager
def _naming_readings(
    trainer: Trainer, planned: PlannedBatches, shapes: Iterable[WindowShape], *, has_whole_model: bool
) -> Iterator[None]:
    """Context manager that raises an `UntraceableModel` in place of the error of a reading."""
    try:
        yield
    except Exception as error:
        if (found := untraceable(error)) is None:
            raise
        if has_whole_model and has_formula(trainer.strategy):
            found.traces = _formulas(trainer, planned, shapes, found.message)
        raise found from error


def _formulas(trainer: Trainer, planned: PlannedBatches, shapes: Iterable[WindowShape], reason: str) -> list[RankTrace]:
    windows = [reshaped(planned.longest if shape.longest else planned.first, shape) for shape in shapes]
    sizes = formula_sizes(trainer, windows, [*planned.notes, reason])
    peaks_of_nothing = {Region("backward", BEFORE): Peak(0, {})}
    return [RankTrace(num_blocks=0, peaks=peaks_of_nothing, allocations=(), messages={}, **one) for one in sizes]


def _traced(
    trainer: Trainer,
    window: Window,
    accumulation: float,
    planned: PlannedBatches,
    places: Places,
    fake: FakeTensorMode,
    categorize: Callable[[Allocation], str | None],
    device_type: str,
) -> RankTrace:
    strategy: Any = trainer.strategy
    local: nn.Module = getattr(strategy, "local", strategy.model)
    is_pipeline = strategy.layout.pipeline_parallel_size > 1
    work = WorkCounter(places.work_phase, (lambda: places.region().block) if is_pipeline else None)
    recorder = RankRecorder(places.region, categorize, work, device_type)
    if is_pipeline:
        # Stages keep a buffer for each micro-batch that they receive, and for each gradient of it.
        recorder.hold(living_tensors(fake), COMMUNICATION)
    hold_engine(recorder, strategy, fake, buckets=BUCKETS, optimizer=OPTIMIZER, parameters=PARAMETERS)
    recorder.hold(other_models(strategy.rule), OTHER_MODELS)
    recorder.hold([*local.parameters(), *local.buffers(), *parts_of(local)], PARAMETERS)
    recorder.hold(_state(strategy.optimizer), OPTIMIZER)
    recorder.hold([item for item in tree_iter(window.batches) if isinstance(item, Tensor)], BATCH)

    def keep_gradients() -> None:
        recorder.set_category((*_gradients(local), *engine_gradients(strategy)), GRADIENTS)

    with recorder:
        # The first of two micro-batches stands for all but the last one, which reduces the gradients.
        work.is_repeated = len(window.batches) > 1
        work.repeats = accumulation - 1 if work.is_repeated else 1
        _step(trainer, window, places, work, after_backward=keep_gradients)
        recorder.set_category(_state(strategy.optimizer), OPTIMIZER)
        for batch in planned.evaluation:
            places.begin_pass("evaluation")
            strategy.evaluate(batch)
        # Answers are no work of a step.
        work.repeats = 0
        for prompts in planned.prompts:
            generate(strategy, prompts, places, lambda cache: recorder.set_category(cache, CACHE))
    notes = (*planned.notes, *kernel_notes(local, strategy.optimizer, device_type))
    found = peaks(recorder.allocations, lambda allocation: allocation.category or TEMPORARIES)
    return RankTrace(
        num_blocks=len(places.blocks),
        peaks=found,
        allocations=tuple(recorder.allocations),
        facts=facts_of(trainer, window, local, notes),
        operations=dict(work.operations),
        messages=dict(work.messages),
        block_operations=dict(work.block_operations),
        repeated={key: count for key, count in work.repeated.items() if count},
    )


def _step(
    trainer: Trainer,
    window: Window,
    places: Places,
    work: WorkCounter,
    *,
    after_backward: Callable[[], None] = lambda: None,
) -> None:
    """Does one optimizer step as `train_window` does, without the checks of values."""
    strategy = trainer.strategy

    def after_micro_batch() -> None:
        places.begin_pass("forward")
        work.repeats, work.is_repeated = 1, False

    places.begin_pass("forward")
    window = window_with_divergence(strategy, window)
    share = strategy.forward_backward(window, denom=loss_divisor(window.num_valid), after_micro_batch=after_micro_batch)
    del share
    after_backward()
    places.begin_pass("update")
    strategy.update(
        max_norm=trainer.args.max_grad_norm, want_norm=True, before_step=lambda norm: False, after_step=lambda: None
    )


def _blocks(local: nn.Module) -> list[nn.Module]:
    stages = getattr(local, "stages", None)
    if isinstance(stages, nn.ModuleDict):
        return [block for stage in stages.values() for block in repeated_blocks(stage)]
    return repeated_blocks(local)


def _gradients(local: nn.Module) -> Iterator[Tensor]:
    for parameter in local.parameters():
        if parameter.grad is not None:
            yield parameter.grad


def _state(optimizer: Any) -> Iterable[Tensor]:
    if optimizer is None:
        return ()
    return [item for state in optimizer.state.values() for item in tree_iter(state) if isinstance(item, Tensor)]
