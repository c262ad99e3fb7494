"""The memory plan of a run: traces of its ranks, and rows by formula for what no trace sees.

`plan_run` takes a function that makes the trainer and the number of processes, and gives a
`forgather.planner.memory_plan.MemoryPlan` as plain data, and the `RunWork` of the same traces. Ranks that hold parts of
the same size are traced once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.allocations import HOST, Region
from forgather.ml.planner.deep_trace import deep_traces
from forgather.ml.planner.fake_build import recomputing_all
from forgather.ml.planner.generation_trace import GENERATION
from forgather.ml.planner.host_activations import ON_THE_WAY
from forgather.ml.planner.peaks import Peak
from forgather.ml.planner.places import BEFORE
from forgather.ml.planner.rank_recorder import WORKSPACES
from forgather.ml.planner.rank_trace import MakeTrainer, trace_rank, trace_shapes
from forgather.ml.planner.saving_rows import saving_rows
from forgather.ml.planner.stage_metadata import Relay
from forgather.ml.planner.stored_state import joined
from forgather.ml.planner.trace_facts import TraceFacts
from forgather.ml.planner.trace_result import RankTrace
from forgather.ml.planner.untraceable import UntraceableModel
from forgather.ml.planner.window_shape import WindowShape
from forgather.planner.memory_plan import (
    OPTIMIZER_STEP,
    MemoryPlan,
    MemoryRow,
    PhaseMemory,
    PlaceMemory,
    RankMemory,
    Source,
)
from forgather.planner.work import Message, RankWork, RunWork

BUDGET = "activation_memory_budget"

_PHASES = {
    "training step": ("forward", "backward", "update"),
    "evaluation": ("evaluation",),
    "generation": (GENERATION,),
}
_BUCKET_BYTES = 25 * 2**20  # the usual size of a bucket of DDP
_WORDS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "update": OPTIMIZER_STEP,
    "evaluation": "evaluation",
    GENERATION: "generation",
}


def plan_run(
    make_trainer: MakeTrainer, *, world_size: int, local_world_size: int, device_type: str = "cpu"
) -> tuple[dict[str, Any], RunWork]:
    """Returns the memory plan of a run as plain data, see `MemoryPlan`, and the work of its steps.

    The memory is that of the longest rows, and the work that of the first rows of the run; of a pipeline, both are of
    the longest rows.

    Args:
        make_trainer: a function that returns the trainer of the config, see `trace_rank`.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        device_type: the kind of device, "cpu" or "cuda", see `trace_shapes`.
    """
    sizes: dict[str, Any] = {
        "world_size": world_size,
        "local_world_size": min(local_world_size, world_size),
        "device_type": device_type,
    }
    traces, usual = traces_of_run(make_trainer, **sizes)
    plan, work = plan_of(traces, usual, **sizes)
    if plan["settings"][BUDGET] not in (None, 1):
        with recomputing_all():
            _note_least(plan, plan_of(*traces_of_run(make_trainer, **sizes), **sizes)[0])
    return plan, work


def _note_least(plan: dict[str, Any], recomputing: Mapping[str, Any]) -> None:
    """Adds the peaks with which blocks recompute everything to the plan of blocks that keep everything."""
    peaks = {tuple(rank["ranks"]): max(phase["num_bytes"] for phase in rank["phases"]) for rank in recomputing["ranks"]}
    for rank in plan["ranks"]:
        peak = max(phase["num_bytes"] for phase in rank["phases"])
        rank["least_bytes"] = min(peak, peaks[tuple(rank["ranks"])])


def plan_of(
    traces: Sequence[RankTrace],
    usual: Sequence[RankTrace],
    *,
    world_size: int,
    local_world_size: int,
    device_type: str,
) -> tuple[dict[str, Any], RunWork]:
    """Returns the plan and the work of a run from its traces, as `plan_run` does.

    Args:
        traces: the traces of the longest rows, by the first rank of each pipeline position; without a pipeline, that of
            rank 0.
        usual: the same of the first rows of the run; empty for a pipeline.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        device_type: the kind of device, "cpu" or "cuda".
    """
    first = traces[0].facts
    width = world_size // len(traces)
    ranks = [
        RankMemory(
            ranks=(position * width, (position + 1) * width - 1),
            stages=trace.facts.stages,
            phases=tuple(_phases(trace)),
            timeline=tuple(_timeline(trace)),
            host=_host(trace),
        )
        for position, trace in enumerate(traces)
    ]
    stored = joined(trace.facts.stored for trace in traces)
    plan = MemoryPlan(
        world_size=world_size,
        device_type=device_type,
        strategy=first.strategy,
        mesh=first.mesh,
        parameters=sum(trace.facts.parameters for trace in traces),
        trainable=sum(trace.facts.trainable for trace in traces),
        rows_per_update=first.rows_per_update,
        tokens_per_row=first.tokens_per_row,
        ranks=tuple(sorted(ranks, key=lambda rank: -rank.peak.num_bytes)),
        model_bytes=sum(stored.model.values()),
        weights_bytes=sum(stored.weights.values()) if stored.is_known else None,
        optimizer_bytes=sum(stored.optimizer.values()) if stored.is_known else None,
        settings=first.settings,
        notes=first.notes,
        convolution_bytes=max(trace.facts.convolution_bytes for trace in traces),
        most_rows=first.most_rows,
    )
    return plan.as_data(), _work(usual or traces, world_size, local_world_size)


def traces_of_run(
    make_trainer: MakeTrainer, *, world_size: int, local_world_size: int, device_type: str = "cpu"
) -> tuple[list[RankTrace], list[RankTrace]]:
    """Returns the trace of one rank at each position of the pipeline, and the trace of usual rows.

    Without a pipeline there is one position, for which rank 0 stands. With one, no usual rows are traced.

    Args:
        make_trainer: a function that returns the trainer of the config, see `trace_rank`.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        device_type: the kind of device, "cpu" or "cuda", see `trace_shapes`.
    """
    local = min(local_world_size, world_size)

    def facts_of(rank: int) -> ProcessFacts:
        return ProcessFacts(rank=rank, local_rank=rank % local, world_size=world_size, local_world_size=local)

    relay = Relay()
    shapes = (WindowShape(), WindowShape(longest=False))
    first, *usual = _first_traces(make_trainer, facts_of(0), shapes, relay, device_type)
    # Without a pipeline all ranks hold parts of the same size, and rank 0 stands for them.
    width = world_size // first.facts.num_pipeline_ranks
    later = [facts_of(rank) for rank in range(width, world_size, width)]
    trace = functools.partial(trace_rank, make_trainer, relay=relay, device_type=device_type)
    traces = [first, *map(trace, later)]
    if not relay.was_right:
        # Rarely, a stage passes on other shapes than the one before it. Now all of them are known.
        traces = [*map(trace, [facts_of(0), *later])]
    return traces, usual


def _first_traces(
    make_trainer: MakeTrainer, facts: ProcessFacts, shapes: Sequence[WindowShape], relay: Relay, device_type: str
) -> Sequence[RankTrace]:
    """Returns the traces of the first rank; by formula if the model cannot be traced and there is a formula."""
    try:
        return deep_traces(make_trainer, facts, shapes, relay=relay, device_type=device_type)
    except UntraceableModel:
        try:
            # A formula needs all blocks.
            return trace_shapes(make_trainer, facts, shapes, device_type=device_type)
        except UntraceableModel as error:
            if not error.traces:
                raise
            return error.traces


def _work(traces: Sequence[RankTrace], world_size: int, local_world_size: int) -> RunWork:
    facts = traces[0].facts
    width = world_size // len(traces)
    return RunWork(
        world_size=world_size,
        local_world_size=local_world_size,
        rows_per_update=facts.mean_rows_per_update,
        tokens_per_row=facts.tokens_per_row,
        num_updates=facts.num_updates,
        schedule=facts.schedule,
        micro_batches=facts.micro_batches,
        schedule_runs=facts.schedule_runs,
        document_length=facts.document_length,
        ranks=tuple(
            RankWork(
                ranks=(position * width, (position + 1) * width - 1),
                stages=trace.facts.stages,
                operations=trace.operations,
                messages={**trace.messages, **_sums_of_ddp(trace.facts, world_size)},
            )
            for position, trace in enumerate(traces)
        ),
    )


def _sums_of_ddp(facts: TraceFacts, world_size: int) -> dict[Message, int]:
    if not facts.reduced_bytes:
        return {}
    count = -(-facts.reduced_bytes // _BUCKET_BYTES)
    return {Message("backward", "c10d.allreduce_", facts.reduced_bytes // count, world_size): count}


def _phases(trace: RankTrace) -> list[PhaseMemory]:
    found = []
    for name, phases in _PHASES.items():
        regions: Mapping[Region, Peak] = {at: peak for at, peak in trace.peaks.items() if at.phase in phases}
        if not regions:
            continue
        at, peak = max(regions.items(), key=lambda item: item[1].num_bytes)
        rows = [
            MemoryRow(name=use, num_bytes=size, source=Source.FORMULA if use == WORKSPACES else Source.TRACED)
            for use, size in peak.categories.items()
            if size
        ]
        # Nothing is moved without a backward pass.
        hidden = () if "backward" in phases else (ON_THE_WAY,)
        rows += [
            MemoryRow(name=use, num_bytes=size, source=Source.FORMULA)
            for use, size in trace.facts.untraced.items()
            if use not in hidden
        ]
        found.append(
            PhaseMemory(
                phase=name,
                at=_words(at, trace.num_blocks),
                made_by=peak.made_by,
                rows=tuple(sorted(rows, key=lambda row: -row.num_bytes)),
            )
        )
    if saved := saving_rows(trace.peaks, trace.facts):
        found.append(PhaseMemory(phase="saving", at="largest weight", made_by="", rows=saved))
    return found


def _host(trace: RankTrace) -> tuple[MemoryRow, ...]:
    peak = trace.peaks.get(Region(HOST, BEFORE))
    sizes = {} if peak is None else peak.categories
    return tuple(MemoryRow(name=use, num_bytes=size) for use, size in sorted(sizes.items(), key=lambda item: -item[1]))


def _timeline(trace: RankTrace) -> list[PlaceMemory]:
    """Returns the parts of a step in their order: a backward pass begins with the last block."""
    first, after_last = -1, trace.num_blocks

    def order(at: Region) -> tuple[int, int]:
        number = list(_WORDS).index(at.phase)
        if at.phase == "backward":
            return number, after_last + 1 if at.block == first else -at.block
        return number, at.block

    return [
        PlaceMemory(
            phase=at.phase,
            block=at.block,
            at=_words(at, trace.num_blocks),
            uses={**trace.peaks[at].categories, **trace.facts.untraced},
        )
        for at in sorted((at for at in trace.peaks if at.phase in _WORDS), key=order)
    ]


def _words(at: Region, num_blocks: int) -> str:
    """Returns a region in words.

    Example:
        >>> _words(Region("backward", 30), 32)
        'backward pass of block 31 of 32'
    """
    name = _WORDS[at.phase]
    if at.phase == "update" or (at.block < 0 and at.phase in ("evaluation", GENERATION)):
        return name
    if at.block < 0:
        return f"{name} before the first block" if at.phase == "forward" else f"end of the {name}"
    if at.block >= num_blocks:
        return f"{name} of the output layer and the loss"
    return f"{name} of block {at.block + 1} of {num_blocks}"
