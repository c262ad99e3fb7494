"""The memory of one rank in one training step and one evaluation, traced without memory and without other processes.

`trace_rank` takes a function that makes the trainer, and a position. It builds the trainer with fake weights, which
have shapes and no values, under a fake process group, lets the trainer's own strategy compute two steps, and records
the second one: the first makes the optimizer's state. Nothing here imitates a step; what is traced is what runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from forgather.launcher_env import ProcessFacts
from forgather.ml.activation_checkpointing import repeated_blocks
from forgather.ml.distributed.env import fake_world
from forgather.ml.distributed.group import leaving_no_group
from forgather.ml.losses import is_causal_lm
from forgather.ml.planner.allocations import Allocation, Region
from forgather.ml.planner.engine_tensors import engine_gradients, hold_engine, passes_to_settle, separate_engine
from forgather.ml.planner.fake_build import FakeBuild
from forgather.ml.planner.generation_trace import generate
from forgather.ml.planner.gpu_attention import GpuAttention
from forgather.ml.planner.gpu_operators import gpu_operators
from forgather.ml.planner.host_activations import HostActivations
from forgather.ml.planner.library_kernels import kernel_notes
from forgather.ml.planner.model_builders import loading_fakes, without_memory_for_models
from forgather.ml.planner.offload import Offload
from forgather.ml.planner.operations import WorkCounter
from forgather.ml.planner.packed_weights import other_models, parts_of
from forgather.ml.planner.peaks import Peak, peaks
from forgather.ml.planner.places import BEFORE, Places, noting_width
from forgather.ml.planner.planned_batches import PlannedBatches, planned_batches
from forgather.ml.planner.rank_recorder import (
    BATCH,
    BUCKETS,
    CACHE,
    COMMUNICATION,
    OTHER_MODELS,
    PREDICTIONS,
    TEMPORARIES,
    RankRecorder,
    category_of,
    gradients_of,
    state_of_optimizer,
)
from forgather.ml.planner.real_integers import RealIntegers
from forgather.ml.planner.remembered_fakes import RememberingFakes
from forgather.ml.planner.stage_metadata import Relay, relayed
from forgather.ml.planner.trace_facts import facts_of, has_bucket_views, mean_accumulation
from forgather.ml.planner.trace_result import RankTrace
from forgather.ml.planner.transformers_steps import TransformersSteps, planned_trainer
from forgather.ml.planner.untraceable import formula_sizes, has_formula, naming_readings, untraceable
from forgather.ml.planner.value_readings import ReadingZeros, keep_loss_scale, living_tensors, only_new_objects
from forgather.ml.planner.window_shape import WindowShape
from forgather.ml.strategy.base import build_strategy
from forgather.ml.strategy.shapes_only import shapes_only
from forgather.ml.trainer.divergence import window_with_divergence
from forgather.ml.trainer.loop import loss_divisor
from forgather.ml.trainer.model_setup import Step
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.trainer.weight_average import WeightAverage, average_of
from forgather.ml.types import Window
from forgather.planner.choices import RECOMPUTE
from forgather.planner.memory_plan import GRADIENTS, OPTIMIZER, PARAMETERS

Constructor = Callable[..., Any]
MakeTrainer = Callable[[Callable[[Constructor], Constructor]], Any]


def trace_rank(
    make_trainer: MakeTrainer,
    facts: ProcessFacts,
    *,
    depth: int | None = None,
    relay: Relay | None = None,
    device_type: str = "cpu",
    cuts_depth: bool = False,
) -> RankTrace:
    """Returns the trace of one rank, with the longest rows. For the arguments and errors see `trace_shapes`."""
    given: Any = {"depth": depth, "relay": relay, "device_type": device_type, "cuts_depth": cuts_depth}
    return trace_shapes(make_trainer, facts, (WindowShape(),), **given)[0]


@naming_readings()
def trace_shapes(
    make_trainer: MakeTrainer,
    facts: ProcessFacts,
    shapes: Sequence[WindowShape],
    *,
    depth: int | None = None,
    relay: Relay | None = None,
    device_type: str = "cpu",
    offloads: Sequence[tuple[str, ...]] = (),
    cuts_depth: bool = False,
    keeps_too: bool = False,
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
        offloads: the parts of the state that other runs of the same strategy offload, for `RankTrace.offloaded`.
        cuts_depth: whether a model that is cut into pipeline stages is shortened as well; its cuts are for `depth`.
        keeps_too: whether the same run without recomputation is traced as well, for `RankTrace.keeping`. Its traces
            come first; then the model recomputes. ZeRO 3 cannot change from one to the other, and has none.

    Returns:
        A trace for each size; for a pipeline only the first one, because its stages are made for one size.

    Raises:
        PlanError: FG997 if `shapes` has other rows, and the tensors of a batch have no common number of rows.
        UntraceableModel: FG962 if the forward pass of the model reads values of tensors; with traces by formula if
            the model was not to be shortened.
        Exception: if the code of the model does not fit its settings.
    """
    fake = RememberingFakes(allow_non_fake_inputs=True)
    build = FakeBuild(fake, depth, cuts_depth=cuts_depth, holds_recomputation=keeps_too)
    with _fake_processes(facts, relay, build):
        made = make_trainer(lambda function: without_memory_for_models(function, fake))
        trainer = planned_trainer(made, device_type)
        batches = planned_batches(trainer, {shape.length for shape in shapes if shape.length})
        with fake, RealIntegers():  # type: ignore[no-untyped-call]
            with ReadingZeros(trainer.strategy.model):
                trainer.strategy.build_optimizer()
            choose_path(trainer.strategy, device_type)
            keep_loss_scale(getattr(trainer.strategy, "precision", None))
            if trainer.strategy.layout.pipeline_parallel_size > 1:
                shapes = shapes[:1]
            with _naming_readings(trainer, batches, shapes, has_whole_model=depth is None):
                traced = _traces(trainer, batches, shapes, fake, device_type, offloads, build.recomputation)
            return [trace.of_model_with(build.whole) for trace in traced]


@contextlib.contextmanager
def _fake_processes(facts: ProcessFacts, relay: Relay | None, build: FakeBuild) -> Iterator[None]:
    """Context manager in which this process is one of several, and strategies are built without memory."""
    token = build_strategy.set(build)
    try:
        stages = contextlib.nullcontext() if relay is None else relayed(relay)
        world = leaving_no_group() if facts.world_size == 1 else fake_world(facts)
        with world, separate_engine(), shapes_only(), loading_fakes(), stages, only_new_objects():
            yield
    finally:
        build_strategy.reset(token)
        # Accelerate keeps the state of this strategy until the Python process ends.
        AcceleratorState._reset_state(reset_partial_state=True)


def choose_path(strategy: Any, device_type: str) -> None:
    """Makes an optimizer of torch compute as it does on a GPU: all weights at once, unless its settings differ.

    In the memory of the host it takes weights one by one.

    Args:
        strategy: the strategy of the run, with its optimizer.
        device_type: the kind of device that is planned for, "cpu" or "cuda".

    Source:
        `torch.optim.optimizer._default_to_fused_or_foreach`, which is false for tensors on a CPU and for fake ones.
    """
    if device_type == "cpu" or OPTIMIZER in Offload.of(strategy, device_type).parts:
        return
    for group in strategy.optimizer.param_groups:
        # Adafactor has no setting "differentiable", and takes weights one by one unless `foreach` is set.
        is_asked = group.get("differentiable") is False and not group.get("fused")
        if "foreach" in group and group["foreach"] is None and is_asked:
            group["foreach"] = True


def _traces(
    trainer: Trainer,
    planned: PlannedBatches,
    shapes: Iterable[WindowShape],
    fake: FakeTensorMode,
    device_type: str,
    offloads: Sequence[tuple[str, ...]],
    recomputation: Sequence[Step],
) -> list[RankTrace]:
    strategy: Any = trainer.strategy
    local: nn.Module = getattr(strategy, "local", strategy.model)
    places = Places(_blocks(local))
    widths: list[int] = []
    windows: dict[Any, tuple[Window, float]] = {}
    keys = []
    for shape in shapes:
        sized = planned.at_length(shape.length).window(shape)
        steps = shape.micro_batches or mean_accumulation(trainer)
        tensors = (item for item in tree_iter(sized.batches) if isinstance(item, Tensor))
        keys.append((shape.length, steps, *(item.shape for item in tensors)))
        windows.setdefault(keys[-1], (sized, steps))
    attention = GpuAttention(device_type)
    on_device = gpu_operators(device_type)
    with places.followed(), noting_width(local, places.blocks, widths), ReadingZeros(local), attention, on_device:
        categorize = category_of(strategy, places, widths)
        tracer = _Tracer(
            trainer,
            planned,
            places,
            fake,
            categorize,
            device_type,
            attention,
            offloads,
            {},
            average_of(strategy, trainer.args),
        )
        settling = passes_to_settle(strategy)
        if not recomputation:
            return tracer.traces(windows, keys, settling)
        keeping = tracer._replace(settings={RECOMPUTE: False}).traces(windows, keys, settling)
        for step in recomputation:
            step(strategy.model)
        # The optimizer has its state.
        recomputing = tracer.traces(windows, keys, 0)
    return [replace(one, keeping=kept) for one, kept in zip(recomputing, keeping, strict=True)]


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
    windows = (planned.at_length(one.length).window(one) for one in shapes)
    sizes = formula_sizes(trainer, windows, [*planned.notes, reason])
    nothing = {Region("backward", BEFORE): Peak(0, {})}
    return [RankTrace(num_blocks=0, peaks=nothing, allocations=(), messages={}, **one) for one in sizes]


class _Tracer(NamedTuple):
    """What all traces of a trainer have in common."""

    trainer: Trainer
    planned: PlannedBatches
    places: Places
    fake: FakeTensorMode
    categorize: Callable[[Allocation], str | None]
    device_type: str
    attention: GpuAttention
    offloads: Sequence[tuple[str, ...]]
    settings: Mapping[str, Any]
    average: WeightAverage | None

    def traces(
        self, windows: Mapping[Any, tuple[Window, float]], keys: Sequence[Any], settling: int
    ) -> list[RankTrace]:
        """Returns the traces of windows.

        Args:
            windows: the windows with their numbers of micro-batches, by keys that begin with the length of the rows.
            keys: the key of each trace.
            settling: the number of micro-batches of a first step for each length, which makes the optimizer's state;
                0 for no such step.
        """
        # Evaluations come after all steps of a length: ZeRO 3 needs a step to learn the order of the modules again.
        ends = {length: (length, *rest) for length, *rest in windows}
        traced: dict[Any, RankTrace] = {}
        for key, (window, steps) in windows.items():
            if settling and key[0] not in {length for length, *_ in traced}:
                first = replace(window, batches=window.batches[:1] * settling)
                _step(self.trainer, first, self.places, WorkCounter(self.places.work_phase))
            of_length = self._replace(planned=self.planned.at_length(key[0]))
            traced[key] = of_length.trace(window, steps, evaluates=key == ends[key[0]])
        return [traced[key].with_evaluation_of(traced[ends[key[0]]]) for key in keys]

    def trace(self, window: Window, accumulation: float, *, evaluates: bool) -> RankTrace:
        """Returns the trace of a step, and of what comes between two steps if it is asked for."""
        trainer, places = self.trainer, self.places
        strategy: Any = trainer.strategy
        local: nn.Module = getattr(strategy, "local", strategy.model)
        is_pipeline = strategy.layout.pipeline_parallel_size > 1
        work = WorkCounter(places.work_phase, (lambda: places.region().block) if is_pipeline else None)
        recorder = RankRecorder(places.region, self.categorize, work, self.device_type)
        moved = HostActivations(recorder, self.device_type)
        places.begin_pass("forward")
        self._hold(recorder, window)
        own = Offload.of(strategy, self.device_type)
        offloads = [own, *(Offload(strategy, parts) for parts in self.offloads)]

        def keep_gradients() -> None:
            recorder.set_category((*gradients_of(local), *engine_gradients(strategy)), GRADIENTS)
            recorder.end_at_birth(gradients_of(local) if has_bucket_views(strategy, window) else ())

        # The first of two micro-batches stands for all but the last one, which reduces the gradients.
        work.is_repeated = len(window.batches) > 1
        work.repeats = accumulation - 1 if work.is_repeated else 1
        with recorder:
            with moved:
                _step(trainer, window, places, work, after_backward=keep_gradients)
            recorder.set_category(state_of_optimizer(strategy.optimizer), OPTIMIZER)
            steps = [offload.placed(recorder, local) for offload in offloads]
            if evaluates:
                self._evaluate(recorder, work)
        kernels = kernel_notes(local, strategy.optimizer, self.device_type)
        notes = [*self.planned.notes, *kernels, *self.attention.notes()]
        facts = facts_of(trainer, window, local, notes, recorder.convolution_bytes)
        settings = {**facts.settings, **self.settings}
        untraced = {**facts.untraced, **moved.untraced()}
        length = self._document_length(facts.tokens_per_row)
        facts = replace(
            facts, most_rows=self.planned.most_rows, settings=settings, untraced=untraced, document_length=length
        )
        first, *others = (
            RankTrace(
                num_blocks=len(places.blocks),
                peaks=peaks(offload.placed(recorder, local), lambda allocation: allocation.category or TEMPORARIES),
                allocations=step,
                facts=offload.facts(facts),
                block_operations=dict(work.block_operations),
                **offload.work(work, accumulation),
            )
            for offload, step in zip(offloads, steps, strict=True)
        )
        return replace(first, offloaded=dict(zip(self.offloads, others, strict=True)))

    def _document_length(self, row_length: int | None) -> float | None:
        if row_length is None or not is_causal_lm(self.trainer.strategy.model):
            return None
        if (packed := self.planned.document_length) is not None:
            return min(packed, row_length)
        return None if self.planned.masking.is_padded else float(row_length)

    def _hold(self, recorder: RankRecorder, window: Window) -> None:
        strategy: Any = self.trainer.strategy
        local: nn.Module = getattr(strategy, "local", strategy.model)
        if strategy.layout.pipeline_parallel_size > 1:
            # Stages keep a buffer for each micro-batch that they receive, and for each gradient of it.
            recorder.hold(living_tensors(self.fake), COMMUNICATION)
        hold_engine(recorder, strategy, self.fake, buckets=BUCKETS, optimizer=OPTIMIZER, parameters=PARAMETERS)
        recorder.hold(other_models(strategy.rule), OTHER_MODELS)
        recorder.hold([*local.parameters(), *local.buffers(), *parts_of(local)], PARAMETERS)
        recorder.hold(state_of_optimizer(strategy.optimizer), OPTIMIZER)
        if self.average is not None:
            recorder.hold(self.average.tensors, OPTIMIZER)
        recorder.hold([item for item in tree_iter(window.batches) if isinstance(item, Tensor)], BATCH)

    def _evaluate(self, recorder: RankRecorder, work: WorkCounter) -> None:
        strategy = self.trainer.strategy
        reads_outputs = self.trainer.metric_functions.compute is not None
        compute = strategy.evaluate if reads_outputs else strategy.evaluate_loss
        for batch in self.planned.evaluation:
            self.places.begin_pass("evaluation")
            (given,) = window_with_divergence(strategy, replace(self.planned.first, batches=[batch])).batches
            compute(given)
            if isinstance(strategy, TransformersSteps):
                recorder.set_category(strategy.predictions, PREDICTIONS)
                strategy.predictions.clear()
        # Answers are no work of a step.
        work.repeats = 0
        for prompts in self.planned.prompts:
            generate(strategy, prompts, self.places, lambda cache: recorder.set_category(cache, CACHE))


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
        # DeepSpeed replaces the gradients of a micro-batch by those of the next one.
        after_backward()
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
