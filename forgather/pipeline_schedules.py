"""The schedules of torch.distributed.pipelining, in one table with the properties of each.

Takes the name of a schedule; gives its properties. This is the only list of schedules in the package: the rules about
settings, the compatibility matrix, the placement of stages and the simulation of idle time read it. torch is not
imported.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class ScheduleFacts(NamedTuple):
    """The properties of a schedule.

    Args:
        one_stage: whether each rank has exactly one stage.
        v_shaped: whether each rank has two stages, with the second stages in reverse order of the ranks, so that the
            first rank has both the first and the last stage.
        splits_backward: whether the gradients of weights are computed separately from those of activations.
        chunk_per_stage: whether the schedule needs at least as many micro-batches as stages.
        rounds: whether the micro-batches must divide evenly into rounds of about one micro-batch for each rank.
    """

    one_stage: bool = False
    v_shaped: bool = False
    splits_backward: bool = False
    chunk_per_stage: bool = False
    rounds: bool = False

    @property
    def usual_stages(self) -> int:
        """The number of stages on a rank if no setting gives it."""
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
    """Returns the names of the schedules that have a property.

    Args:
        fact: the name of a field of `ScheduleFacts`. With "not " before the name, the schedules without the property
            are returned.

    Example:
        >>> schedules_with("one_stage")
        ('ScheduleGPipe', 'Schedule1F1B')
    """
    wanted = not fact.startswith("not ")
    return tuple(name for name, facts in SCHEDULES.items() if getattr(facts, fact.removeprefix("not ")) is wanted)


def with_schedules(data: Any) -> Any:
    """Returns the data of a rule or of a matrix cell, with names of schedules in place of placeholders.

    "schedules" stands for all schedules, "schedules.FACT" for those with a property. A text that consists of a
    placeholder becomes a list of names; a "schedules.FACT" inside a condition becomes a tuple of names.
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
