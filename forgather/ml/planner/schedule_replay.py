"""The memory of a rank in a run of a pipeline's schedule: the effects of its passes, in torch's own order.

`replayed` takes the passes of a rank in their order and the effect of each, and gives the largest sum of bytes. What
stages pass on is kept as long as torch's schedule keeps it, which `_released` says.

Units:
    bytes, relative to those when the run begins.

Source:
    torch 2.13, `torch/distributed/pipelining/schedules.py`: `Schedule1F1B` and `ScheduleGPipe` wait for messages
    between passes, `_PipelineScheduleRuntime` waits for all that it sent at the end of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from forgather.ml.planner.pass_shape import Span, added
from forgather.ml.planner.rank_recorder import COMMUNICATION
from forgather.ml.planner.stage_variants import Effect
from forgather.ml.strategy.pipeline.schedules import Placement

Action = tuple[int, str, int]
"""The number of a stage, the kind of a pass, and the number of a micro-batch."""

ALTERNATING = "Schedule1F1B"
"""The schedule that frees what it sent between passes, and in which the last stage keeps an output, see `shapes_of`."""


class Replayed(NamedTuple):
    """The largest sum of bytes of a rank in a run of the schedule.

    Args:
        kind: the kind of the pass in which it is.
        peak: the change since the beginning of the run, by category.
        made_by: what was allocated last.
        left: what the run leaves, by category, if nothing of it were freed at its end.
    """

    kind: str
    peak: Mapping[str, int]
    made_by: str
    left: Mapping[str, int]


class _Step(NamedTuple):
    kind: str
    span: Span
    after: Mapping[str, int]
    after_bytes: int


def replayed(
    queue: Sequence[Action],
    effect_of: Callable[[Action], Effect],
    schedule: str,
    placement: Placement,
) -> Replayed:
    """Returns the largest sum of bytes of a rank.

    Args:
        queue: the passes of the rank in their order.
        effect_of: a function that returns the effect of a pass.
        schedule: the name of the schedule.
        placement: the ranks of the stages.
    """
    steps = _steps(queue, effect_of, schedule, placement)
    total, most, where = 0, -1, 0
    for index, step in enumerate(steps):
        if step.span.made_by and total + step.span.peak_bytes > most:
            most, where = total + step.span.peak_bytes, index
        total += step.span.change_bytes + step.after_bytes
    left: dict[str, int] = {}
    peak: dict[str, int] = {}
    for index, step in enumerate(steps):
        if index == where:
            peak = added(left, step.span.peak)
        for change in (step.span.change, step.after):
            for name, size in change.items():
                left[name] = left.get(name, 0) + size
    return Replayed(steps[where].kind, peak, steps[where].span.made_by, left)


def _steps(
    queue: Sequence[Action], effect_of: Callable[[Action], Effect], schedule: str, placement: Placement
) -> list[_Step]:
    sent: dict[Action, Mapping[str, int]] = {}
    waited = _waited_for(queue) if schedule == ALTERNATING else (None, queue[-1])
    steps = []
    for action in queue:
        stage, kind, micro_batch = action
        effect = effect_of(action)
        after: dict[str, int] = {}
        if schedule == ALTERNATING and kind == "B":
            freed = [(stage, "F", micro_batch), (stage, "B", micro_batch - 1)]
            if waited[0] in freed and queue.index(action) < queue.index(waited[1]):
                freed.remove(waited[0])
            elif action == waited[1] and waited[0] is not None and waited[0][2] < micro_batch:
                freed.append(waited[0])
            for one in freed:
                after = added(after, sent.pop(one, {}), -1)
        neighbor = stage + 1 if kind == "F" else stage - 1
        if _is_inside(placement, stage, neighbor) and effect.passed_on:
            # The stage of the same rank takes it in place of the buffer of an earlier run.
            after = added(after, {COMMUNICATION: sum(effect.passed_on.values())}, -1)
        elif effect.passed_on:
            sent[stage, "F" if kind == "F" else "B", micro_batch] = effect.passed_on
        steps.append(_Step(kind, effect.span, after, sum(after.values())))
    return steps


def _waited_for(queue: Sequence[Action]) -> tuple[Action | None, Action]:
    """Returns the forward pass whose output `Schedule1F1B` keeps until a later backward pass, and this pass.

    Its variable `send_work` is that of the last but one forward pass before the first backward pass, until the first
    backward pass after the last forward pass.
    """
    kinds = [kind for _, kind, _ in queue]
    warm_up, last = kinds.index("B"), len(kinds) - 1 - kinds[::-1].index("F")
    return (queue[warm_up - 2] if warm_up > 1 else None), queue[last + 1]


def _is_inside(placement: Placement, stage: int, neighbor: int) -> bool:
    return 0 <= neighbor < placement.num_stages and placement.rank_of(stage) == placement.rank_of(neighbor)
