"""The cuts of a pipeline for `split_spec: auto`: found by dynamic programming, and confirmed by a trace of their own.

`search_split` takes a function that makes the trainer for any cuts. All ranks are traced under balanced cuts. The
traces give what each part costs and needs, from which the best cuts within the memory follow. These are traced as well:
if they need more memory than computed, the search goes on from their traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.memory import traces_of_run
from forgather.ml.planner.rank_trace import MakeTrainer, trace_rank
from forgather.ml.planner.stage_costs import costs_of, memory_of, rank_bytes
from forgather.ml.planner.stage_metadata import Relay
from forgather.ml.planner.stage_parts import StageParts
from forgather.ml.planner.trace_result import RankTrace
from forgather.ml.strategy.pipeline.split import SplitPlan
from forgather.planner.hardware import Hardware
from forgather.planner.stage_cuts import UnitCosts, balanced_cuts, no_room

_MOST_SEARCHES = 5

MakeWithCuts = Callable[[Mapping[str, str] | None], MakeTrainer]


class _Costs(NamedTuple):
    parts: UnitCosts
    speeds: tuple[float, ...]


def search_split(
    make_with: MakeWithCuts,
    *,
    world_size: int,
    local_world_size: int,
    devices: Sequence[Hardware] = (),
    limits: Sequence[float] = (),
) -> dict[str, Any]:
    """Returns the best cuts of a pipeline as plain data.

    Args:
        make_with: a function of a mapping for `split_spec`, or of None for balanced cuts, which returns a function that
            makes the trainer, see `trace_shapes`.
        world_size: the number of processes.
        local_world_size: the number of processes on one machine.
        devices: the device of each pipeline rank, or one for all; empty if unknown. If the rates of one are unknown,
            the cost of a part is that of `unit_costs`.
        limits: the bytes of each pipeline rank, or one number for all; empty if all have memory enough.

    Returns:
        spec: the cuts, as a mapping for `split_spec`.
        stages: one line for each stage.
        peaks: the traced bytes of each pipeline rank; empty if neither devices nor limits are given, which needs no
            trace of all ranks.

    Raises:
        PlanError: FG947 if no cuts fit into the memory; FG948 if the number of devices or limits is neither one nor
            that of the pipeline ranks.
    """
    local = min(local_world_size, world_size)
    kind = "cuda" if any(device.kind != "cpu" for device in devices) else "cpu"
    if not devices and not limits:
        facts = ProcessFacts(rank=0, local_rank=0, world_size=world_size, local_world_size=local)
        return _answer(_parts(trace_rank(make_with(None), facts, relay=Relay())).plan)

    def trace(spec: Mapping[str, str] | None) -> list[RankTrace]:
        return traces_of_run(make_with(spec), world_size=world_size, local_world_size=local, device_type=kind)[0]

    traces = trace(None)
    parts = _parts(traces[0])
    num_ranks = parts.placement.num_ranks
    costs = _costs(traces, parts, _for_each(devices, num_ranks))
    room = _for_each(limits, num_ranks) or (float("inf"),) * num_ranks
    found: dict[tuple[int, ...], list[RankTrace]] = {}
    while True:
        plan = _parts(traces[0]).plan
        found[plan.cuts] = traces
        memory = memory_of(traces, room)
        cuts = balanced_cuts(costs.parts, plan.num_stages, speeds=costs.speeds, memory=memory)
        if cuts in found or len(found) == _MOST_SEARCHES:
            break
        traces = trace(replace(plan, cuts=cuts).as_spec())
    fitting = {cuts: traces for cuts, traces in found.items() if _over(traces, room)[0] <= 0}
    if not fitting:
        raise no_room(*min(_over(traces, room) for traces in found.values()), plan.num_stages)
    best = min(fitting, key=lambda cuts: _slowest(costs, cuts))
    return _answer(replace(plan, cuts=best), [rank_bytes(trace) for trace in fitting[best]])


def _costs(traces: Sequence[RankTrace], parts: StageParts, devices: Sequence[Hardware]) -> _Costs:
    stages = range(parts.plan.num_stages)
    if not devices or not all(device.gives_times for device in devices):
        return _Costs(parts.shares, (1.0,) * len(stages))
    seconds = [costs_of(traces, device) for device in devices]
    whole = [sum((one.before, *one.blocks, one.after)) for one in seconds]
    return _Costs(seconds[0], tuple(whole[0] / whole[parts.placement.rank_of(stage)] for stage in stages))


def _slowest(costs: _Costs, cuts: tuple[int, ...]) -> float:
    return max(cost / speed for cost, speed in zip(costs.parts.of_stages(cuts), costs.speeds, strict=True))


def _over(traces: Sequence[RankTrace], room: Sequence[float]) -> tuple[float, int, float]:
    """Returns by how much the rank that lacks most memory is over its limit, its number, and its limit."""
    return max(
        (rank_bytes(trace) - limit, rank, limit) for rank, (trace, limit) in enumerate(zip(traces, room, strict=True))
    )


def _for_each(given: Sequence[Any], num_ranks: int) -> tuple[Any, ...]:
    if len(given) in (0, num_ranks):
        return tuple(given)
    if len(given) == 1:
        return tuple(given) * num_ranks
    raise PlanError(
        f"hardware or device_memory has {len(given)} items, and the pipeline has {num_ranks} ranks",
        code="FG948",
        hint="give one item for all ranks, or one for each",
    )


def _parts(trace: RankTrace) -> StageParts:
    parts = trace.facts.parts
    assert parts is not None, "the trainer is a pipeline"  # noqa: S101
    return parts


def _answer(plan: SplitPlan, peaks: Sequence[int] = ()) -> dict[str, Any]:
    return {"spec": plan.as_spec(), "stages": plan.describe(), "peaks": list(peaks)}
