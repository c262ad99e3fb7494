"""What the stages of a pipeline cost and need under any cuts, from traces of all ranks under some cuts.

`costs_of` gives the seconds of each part of the model, and `memory_of` the memory that stages need, from which
`planner/stage_cuts.py` finds better cuts. The memory of the cuts that were traced is the traced one exactly.

Units:
    seconds, bytes.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence

from forgather.ml.planner.allocations import Allocation
from forgather.ml.planner.peaks import Peak
from forgather.ml.planner.stage_parts import StageParts
from forgather.ml.planner.trace_result import RankTrace
from forgather.ml.strategy.pipeline.bubble_simulation import actions_of
from forgather.ml.strategy.pipeline.schedules import Placement
from forgather.planner.efficiency import Efficiency
from forgather.planner.hardware import Hardware
from forgather.planner.memory_plan import GRADIENTS, OPTIMIZER, PARAMETERS
from forgather.planner.stage_cuts import StageMemory, UnitCosts
from forgather.planner.step_time import operation_seconds

_STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)


def costs_of(traces: Sequence[RankTrace], hardware: Hardware) -> UnitCosts:
    """Returns the seconds of each part in an optimizer step, on one device.

    Args:
        traces: the traces of all ranks of a pipeline, in order.
        hardware: the device, whose rates are known.
    """
    parts = _parts(traces)
    efficiency = Efficiency()
    seconds, update = [0.0] * len(_listed(parts.trained)), 0.0
    for rank, trace in enumerate(traces):
        for (block, operation), count in trace.block_operations.items():
            if operation.phase == "evaluation":
                continue
            taken = operation_seconds(operation, hardware, efficiency).high * count
            if operation.phase == "update":
                update += taken
            elif (part := parts.part_of(rank, block)) is not None:
                seconds[part] += taken
    trained = _listed(parts.trained)
    # An optimizer takes as long for a weight in any block.
    shares = [update * size / (sum(trained) or 1) for size in trained]
    return _as_costs([one + other for one, other in zip(seconds, shares, strict=True)])


def memory_of(traces: Sequence[RankTrace], limits: Sequence[float]) -> StageMemory:
    """Returns the memory that stages need under any cuts.

    Args:
        traces: the traces of all ranks of a pipeline, in order.
        limits: the bytes of each rank.
    """
    parts = _parts(traces)
    placement, facts = parts.placement, traces[0].facts
    assert facts.schedule is not None  # noqa: S101 - these are the traces of a pipeline
    in_flight = micro_batches_in_flight(facts.schedule, placement, facts.micro_batches)
    state = sum(_state_bytes(trace) for trace in traces)
    weights, trained = _listed(parts.weights), _listed(parts.trained)
    # Sharded or not, each trained byte of a weight has the same gradient and the same state of the optimizer.
    held_weights = sum(_step_peak(trace).categories.get(PARAMETERS, 0) for trace in traces)
    of_weights = held_weights / (sum(weights) or 1)
    of_trained = (state - held_weights) / (sum(trained) or 1)
    held = [of_weights * one + of_trained * other for one, other in zip(weights, trained, strict=True)]
    kept = [0.0] * len(held)
    for rank, trace in enumerate(traces):
        for block, num_bytes in _kept_bytes(trace.allocations).items():
            if (part := parts.part_of(rank, block)) is not None:
                kept[part] += num_bytes / (facts.micro_batches * _passes(trace))
    memory = StageMemory(
        held=_as_costs(held),
        kept=_as_costs(kept),
        in_flight=in_flight,
        extra=(0.0,) * placement.num_stages,
        ranks=tuple(placement.rank_of(stage) for stage in range(placement.num_stages)),
        limits=tuple(limits),
    )
    return memory.with_needs(parts.plan.cuts, [rank_bytes(trace) for trace in traces])


def micro_batches_in_flight(schedule: str, placement: Placement, micro_batches: int) -> tuple[int, ...]:
    """Returns for each stage the largest number of micro-batches between their forward and their backward pass.

    The order of the passes is torch's own.

    Args:
        schedule: the name of the schedule.
        placement: the ranks of the stages.
        micro_batches: the number of micro-batches.

    Example:
        >>> micro_batches_in_flight("Schedule1F1B", Placement(4, 1, v_shaped=False), 8)
        (4, 3, 2, 1)
    """
    now, most = Counter[int](), Counter[int]()
    for queue in actions_of(schedule, placement.num_ranks, micro_batches, placement.stages_per_rank):
        for stage, kind, _ in queue:
            # A backward pass in two parts keeps the activations until the gradients of the weights are computed.
            now[stage] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
            most[stage] = max(most[stage], now[stage])
    return tuple(most[stage] for stage in range(placement.num_stages))


def _step_peak(trace: RankTrace) -> Peak:
    """Returns the largest peak of a training step."""
    return max((peak for at, peak in trace.peaks.items() if at.phase != "evaluation"), key=lambda peak: peak.num_bytes)


def rank_bytes(trace: RankTrace) -> int:
    """Returns the largest sum of bytes on a rank."""
    return trace.peak[1].num_bytes + sum(trace.facts.untraced.values())


def _parts(traces: Sequence[RankTrace]) -> StageParts:
    parts = traces[0].facts.parts
    assert parts is not None  # noqa: S101 - these are the traces of a pipeline
    return parts


def _state_bytes(trace: RankTrace) -> int:
    categories = _step_peak(trace).categories
    return sum(categories.get(name, 0) for name in _STATE)


def _passes(trace: RankTrace) -> int:
    """Returns how many runs of the schedule a trace has: the first of two stands for all but the last one."""
    return 2 if trace.facts.schedule_runs > 1 else 1


def _kept_bytes(allocations: Sequence[Allocation]) -> Counter[int]:
    """Returns the bytes that forward passes of each block leave for the backward pass, added over all micro-batches."""
    later = [item for item in allocations if item.operation]
    times = [item.born for item in later]
    kept = Counter[int]()
    for item in allocations:
        if item.region.phase != "forward" or not item.operation or item.category in _STATE:
            continue
        is_kept = item.died is None or later[bisect.bisect_right(times, item.died) - 1].region.phase != "forward"
        if is_kept:
            kept[item.region.block] += item.num_bytes
    return kept


def _listed(costs: UnitCosts) -> list[float]:
    return [costs.before, *costs.blocks, costs.after]


def _as_costs(values: Sequence[float]) -> UnitCosts:
    return UnitCosts(before=values[0], blocks=tuple(values[1:-1]), after=values[-1])
