"""The pipeline schedules of torch.distributed.pipelining, in one table with the properties of each.

This is the only list of the schedules and of their properties. The rules about settings, the compatibility matrix, the
placement of stages on ranks and the simulation of pipeline bubbles read it. The module does not import torch.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class ScheduleFacts(NamedTuple):
    """The properties of one pipeline schedule.

    Args:
        one_stage: True if each rank has exactly one stage.
        v_shaped: True if each rank has two stages and the second stages are assigned in reverse rank order, so that the
            first rank has both the first and the last stage.
        splits_backward: True if the gradients of weights are computed separately from the gradients of activations.
        chunk_per_stage: True if the schedule needs at least as many micro-batches as there are stages.
        rounds: True if the number of micro-batches must be divisible by the number of rounds, which is the number of
            micro-batches divided by the number of ranks, rounded down, and at least 1.
    """

    one_stage: bool = False
    v_shaped: bool = False
    splits_backward: bool = False
    chunk_per_stage: bool = False
    rounds: bool = False

    @property
    def usual_stages(self) -> int:
        """The number of stages per rank if no setting gives that number."""
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
"""The properties of each schedule that torch provides, by the name of its class."""


def schedules_with(fact: str) -> tuple[str, ...]:
    """Returns the names of the schedules that have a property, or of those that do not have it.

    Args:
        fact: the name of a field of `ScheduleFacts`. With the prefix "not ", the schedules without the property are
            returned.

    Example:
        >>> schedules_with("one_stage")
        ('ScheduleGPipe', 'Schedule1F1B')
    """
    wanted = not fact.startswith("not ")
    return tuple(name for name, facts in SCHEDULES.items() if getattr(facts, fact.removeprefix("not ")) is wanted)


def too_many_stages(num_stages: int, num_blocks: int, *, num_others: int = 2) -> str | None:
    """Returns what is wrong if a model has too few blocks for some number of stages; None if it has enough.

    Args:
        num_stages: the number of stages.
        num_blocks: the number of blocks of the model.
        num_others: the number of stages that need no block: the modules before the blocks can be one, and those after
            them another.

    Example:
        >>> too_many_stages(16, 8), too_many_stages(10, 8)
        ('16 stages are requested, and the model has 8 blocks', None)
    """
    if num_stages <= num_blocks + num_others:
        return None
    return f"{num_stages} stages are requested, and the model has {num_blocks} block{'' if num_blocks == 1 else 's'}"


def with_schedules(data: Any) -> Any:
    """Returns the data of a rule or of a matrix cell, with names of schedules in place of placeholders.

    "schedules" stands for all schedules, "schedules.FACT" for those with a property. A text that consists of a
    placeholder becomes a list of names. A "schedules.FACT" inside a condition becomes a tuple of names.

    Args:
        data: a mapping, a list, a string or any other JSON value. The placeholders are replaced at any depth.
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
