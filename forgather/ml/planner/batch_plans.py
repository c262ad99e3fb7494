"""The plans of one run with several batches: the same update, divided into micro-batches in several ways.

`plan_batches` traces the smallest and the largest of the accumulated micro-batches, and the whole update as one;
`row_line.py` computes all between them. A size that runs another program than the largest one is traced itself. From
the same traces follow the plans of runs that only offload more of their state. `full_plans` traces each batch itself,
with all blocks of the model. Pipelines are not planned here: their stages are made for one number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forgather.errors import TrainingError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.deep_trace import DepthTraces, depth_traces
from forgather.ml.planner.memory import plan_of
from forgather.ml.planner.rank_trace import MakeTrainer, trace_shapes
from forgather.ml.planner.row_line import runs_one_program, trace_at
from forgather.ml.planner.trace_result import RankTrace
from forgather.ml.planner.transformers_steps import planned_trainer
from forgather.ml.planner.window_shape import WindowShape
from forgather.ml.trainer.batch_sampler import RankShare
from forgather.ml.trainer.row_checks import check_size
from forgather.ml.trainer.stream_choice import is_iterable
from forgather.planner.work import RunWork

Plans = list[tuple[dict[str, Any], RunWork] | TrainingError]


def plan_batches(
    make_trainer: MakeTrainer,
    *,
    world_size: int,
    local_world_size: int,
    batches: Sequence[tuple[int, int]],
    device_type: str = "cpu",
) -> Plans:
    """Returns the memory plan and the work of a run for several batches, see `plans_by_offload`."""
    return plans_by_offload(
        make_trainer,
        world_size=world_size,
        local_world_size=local_world_size,
        batches=batches,
        device_type=device_type,
    )[()]


def plans_by_offload(
    make_trainer: MakeTrainer,
    *,
    world_size: int,
    local_world_size: int,
    batches: Sequence[tuple[int, int]],
    device_type: str = "cpu",
    offloads: Sequence[tuple[str, ...]] = (),
) -> dict[tuple[str, ...], Plans]:
    """Returns the memory plan and the work of a run for several batches, see `plan_run`, and of runs that offload more.

    Args:
        make_trainer: a function that returns the trainer of the config, see `trace_shapes`.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        batches: pairs of the rows of a micro-batch and the number of micro-batches of an update.
        device_type: the kind of device, "cpu" or "cuda", see `trace_shapes`.
        offloads: the parts of the state that other runs of the same strategy offload, see `RankTrace.offloaded`.

    Returns:
        By the parts that are offloaded, and of the run itself by `()`: for each batch, its plan and its work, or the
        error FG804 if the data has fewer rows than one micro-batch of all replicas.

    Raises:
        PlanError: FG997 if the tensors of a batch have no common number of rows.
    """
    sized = _Sizes(make_trainer, batches, device_type)
    facts = _rank_0(world_size, local_world_size)
    trace = functools.partial(depth_traces, sized.make_trainer, facts, device_type=device_type, offloads=offloads)
    return sized.plans_by_offload(trace, facts=facts, offloads=offloads)


def plans_by_recomputation(
    make_trainer: MakeTrainer,
    *,
    world_size: int,
    local_world_size: int,
    batches: Sequence[tuple[int, int]],
    device_type: str = "cpu",
    offloads: Sequence[tuple[str, ...]] = (),
) -> dict[bool, dict[tuple[str, ...], Plans]]:
    """Returns `plans_by_offload` of a run that recomputes activations (True), and of the same one that keeps them.

    One trainer is built for both, and for each depth of the model. For the arguments and errors see `plans_by_offload`.

    Returns:
        The plans of both; only those of the first if one trainer cannot be traced for both, see `trace_shapes`.
    """
    sized = _Sizes(make_trainer, batches, device_type)
    facts = _rank_0(world_size, local_world_size)
    known: dict[WindowShape, DepthTraces] = {}

    def trace(shapes: Sequence[WindowShape]) -> list[DepthTraces]:
        if missing := [shape for shape in shapes if shape not in known]:
            found = depth_traces(
                sized.make_trainer, facts, missing, device_type=device_type, offloads=offloads, keeps_too=True
            )
            known.update(zip(missing, found, strict=True))
        return [known[shape] for shape in shapes]

    def trace_keeping(shapes: Sequence[WindowShape]) -> list[DepthTraces]:
        return [one.keeping for one in trace(shapes) if one.keeping is not None]

    recomputing = sized.plans_by_offload(trace, facts=facts, offloads=offloads)
    if any(one.keeping is None for one in known.values()):
        return {True: recomputing}
    return {True: recomputing, False: sized.plans_by_offload(trace_keeping, facts=facts, offloads=offloads)}


class _Traced:
    """The traces of the longest and of usual rows, from which those of all batches follow."""

    def __init__(
        self, trace: Callable[[Sequence[WindowShape]], list[DepthTraces]], batches: Sequence[tuple[int, int]]
    ) -> None:
        self._trace = trace
        self._longest: dict[tuple[int, int], DepthTraces] = {}
        self._usual: dict[tuple[int, int], DepthTraces] = {}
        accumulated = sorted(rows for rows, number in batches if number > 1)
        self._points = sorted({*accumulated[:1], *accumulated[-1:]})
        self._add([*((rows, 2) for rows in self._points), *((rows, 1) for rows, number in batches if number == 1)])
        if len(accumulated) > 2 and not self._are_on_a_line():
            # Padding masks attention, and a micro-batch of one row has none: the line may begin with the next number.
            self._add([(accumulated[1], 2)])
            self._points = [accumulated[1], accumulated[-1]]
            if len(accumulated) > 3 and not self._are_on_a_line():
                # Nothing follows from two numbers of rows: each is traced itself.
                self._add([(rows, 2) for rows in accumulated[2:-1]])

    def _add(self, sizes: Sequence[tuple[int, int]]) -> None:
        found = self._trace(_shapes(sizes))
        self._longest.update(zip(sizes, found[: len(sizes)], strict=True))
        self._usual.update(zip(sizes, found[len(sizes) :], strict=True))

    def _are_on_a_line(self) -> bool:
        kinds = (self._longest, self._usual)
        return all(runs_one_program({rows: found[rows, 2] for rows in self._points}) for found in kinds)

    def of(self, rows: int, micro_batches: int, parts: tuple[str, ...]) -> tuple[RankTrace, RankTrace]:
        """Returns the traces of a batch, of the longest and of usual rows, with some parts of the state offloaded."""

        def one(found: Mapping[tuple[int, int], DepthTraces]) -> RankTrace:
            if micro_batches == 1:
                return found[rows, 1].offloaded(parts).deep
            sizes = [rows] if (rows, 2) in found else self._points
            return trace_at({size: found[size, 2].offloaded(parts) for size in sizes}, rows, micro_batches)

        return one(self._longest), one(self._usual)


def full_plans(
    make_trainer: MakeTrainer,
    *,
    world_size: int,
    local_world_size: int,
    batches: Sequence[tuple[int, int]],
    device_type: str = "cpu",
) -> Plans:
    """Returns the same as `plan_batches`, from a trace of each batch with all blocks of the model: nothing is drawn."""
    sized = _Sizes(make_trainer, batches, device_type)
    facts = _rank_0(world_size, local_world_size)
    found = trace_shapes(sized.make_trainer, facts, _shapes(batches), device_type=device_type)
    traces = dict(zip(batches, zip(found[: len(batches)], found[len(batches) :], strict=True), strict=True))
    return sized.plans(traces.__getitem__, facts=facts, device_type=device_type)


def _rank_0(world_size: int, local_world_size: int) -> ProcessFacts:
    local = min(local_world_size, world_size)
    return ProcessFacts(rank=0, local_rank=0, world_size=world_size, local_world_size=local)


def _shapes(sizes: Sequence[tuple[int, int]]) -> list[WindowShape]:
    return [WindowShape(rows=rows, micro_batches=n, longest=longest) for longest in (True, False) for rows, n in sizes]


class _Sizes:
    """The batches of a run whose data may have too few rows for some of them."""

    def __init__(self, make_trainer: MakeTrainer, batches: Sequence[tuple[int, int]], device_type: str) -> None:
        self._make_trainer = make_trainer
        self._batches = batches
        self._device_type = device_type
        self._refused: dict[int, TrainingError] = {}

    def make_trainer(self, hook: Any) -> Any:
        """Returns the trainer, and notes for which micro-batches its data has too few rows."""
        trainer = planned_trainer(self._make_trainer(hook), self._device_type)
        dataset, _ = trainer._inputs(trainer.train_dataset)
        for rows, _ in self._batches:
            try:
                if not is_iterable(dataset):
                    check_size(len(dataset), RankShare.for_topology(trainer.strategy.topology, rows))
            except TrainingError as error:
                self._refused[rows] = error
        return trainer

    def plans_by_offload(
        self,
        trace: Callable[[Sequence[WindowShape]], list[DepthTraces]],
        *,
        facts: ProcessFacts,
        offloads: Sequence[tuple[str, ...]],
    ) -> dict[tuple[str, ...], Plans]:
        """Returns the plans of all batches, by what is offloaded, from the traces of few of them."""
        traced = _Traced(trace, self._batches)

        def plans(parts: tuple[str, ...]) -> Plans:
            return self.plans(lambda batch: traced.of(*batch, parts), facts=facts, device_type=self._device_type)

        return {parts: plans(parts) for parts in ((), *offloads)}

    def plans(
        self,
        traces_of: Callable[[tuple[int, int]], tuple[RankTrace, RankTrace]],
        *,
        facts: ProcessFacts,
        device_type: str,
    ) -> Plans:
        """Returns the plan of each batch, from its traces of the longest and of usual rows."""
        found: Plans = []
        for batch in self._batches:
            if (refused := self._refused.get(batch[0])) is not None:
                found.append(refused)
                continue
            longest, usual = (_sized(trace, *batch) for trace in traces_of(batch))
            found.append(
                plan_of(
                    [longest],
                    [usual],
                    world_size=facts.world_size,
                    local_world_size=facts.local_world_size,
                    device_type=device_type,
                )
            )
        return found


def _sized(trace: RankTrace, rows: int, micro_batches: int) -> RankTrace:
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    return replace(trace, facts=replace(trace.facts, settings={**trace.facts.settings, **sizes}))
