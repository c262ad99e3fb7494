"""The schedules of torch.distributed.pipelining: one table of what each asks for.

Takes names; gives facts. Keeps true: this is the only list of schedules and of their properties. The rules about
settings, the compatibility matrix, the placement of stages and the simulation of idle time read it. No torch.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class ScheduleFacts(NamedTuple):
    """What holds for a schedule.

    Args:
        one_stage: a rank holds one stage, no more.
        v_shaped: a rank holds two stages; the second ones are in reverse order, so the last stage is with the first.
        splits_backward: gradients of weights are computed apart from those of activations.
        chunk_per_stage: it needs at least as many micro-batches as stages.
        rounds: micro-batches must split evenly into rounds of about as many as there are ranks.
    """

    one_stage: bool = False
    v_shaped: bool = False
    splits_backward: bool = False
    chunk_per_stage: bool = False
    rounds: bool = False

    @property
    def usual_stages(self) -> int:
        """The number of stages of a rank where no setting gives one."""
        return 1 if self.one_stage else 2


SCHEDULES = {
    "ScheduleGPipe": ScheduleFacts(one_stage=True),
    "Schedule1F1B": ScheduleFacts(one_stage=True, chunk_per_stage=True),
    "ScheduleLoopedBFS": ScheduleFacts(),
    "ScheduleInterleaved1F1B": ScheduleFacts(rounds=True),
    "ScheduleInterleavedZeroBubble": ScheduleFacts(splits_backward=True, rounds=True),
    "ScheduleZBVZeroBubble": ScheduleFacts(v_shaped=True, splits_backward=True),
    "ScheduleDualPipeV": ScheduleFacts(v_shaped=True, splits_backward=True, chunk_per_stage=True),
}
"""The schedules that torch ships."""


def schedules_with(fact: str) -> tuple[str, ...]:
    """Returns the schedules for which a fact holds; "not " before it for the others.

    Example:
        >>> schedules_with("one_stage")
        ('ScheduleGPipe', 'Schedule1F1B')
    """
    wanted = not fact.startswith("not ")
    return tuple(name for name, facts in SCHEDULES.items() if getattr(facts, fact.removeprefix("not ")) is wanted)


def with_schedules(data: Any) -> Any:
    """Returns data of a rule or of a matrix cell with names in place of "schedules" and "schedules.FACT".

    A text that is nothing else becomes a list; inside a condition it becomes a tuple of names.
    """
    if isinstance(data, dict):
        return {key: with_schedules(value) for key, value in data.items()}
    if isinstance(data, list):
        return [with_schedules(value) for value in data]
    if data == "schedules":
        return list(SCHEDULES)
    if not isinstance(data, str) or "schedules." not in data:
        return data
    if found := re.fullmatch(r"schedules\.((?:not )?\w+)", data):
        return list(schedules_with(found[1]))
    return re.sub(r"\bschedules\.(\w+)", lambda found: repr(schedules_with(found[1])), data)
