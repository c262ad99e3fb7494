"""How many machines a deadline needs, by time and by memory.

Takes the fits of two plans of different sizes; gives the number of machines from which on every rank fits.

Units:
    machines, days, tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forgather.planner.efficiency import Range
from forgather.planner.fit import RankFit


@dataclass(frozen=True, kw_only=True)
class DeviceCount:
    """How many machines train on a number of tokens within some days.

    Args:
        devices_per_machine: the number of devices of one machine.
        by_time: the number of machines that finish in time.
        by_memory: the number of machines from which on every rank fits; None if more machines do not help, or if the
            memory of the device is unknown.
        planned: the number of machines for which the following was planned: enough even with the worse efficiency.
        why_fewer: why fewer machines were planned than finish in time; None if they were not.
        days: the days that these machines need.
        tokens_per_update: the tokens of one optimizer step of these machines.
        tokens_before: the tokens of one optimizer step of the devices that were planned first.
        verdict: whether the ranks of these machines fit, see `forgather.planner.fit.Verdict`; "unknown" if the memory
            of the device is unknown.
    """

    devices_per_machine: int
    by_time: Range
    by_memory: int | None
    planned: int
    why_fewer: str | None
    days: Range
    tokens_per_update: int
    tokens_before: int
    verdict: str

    def as_data(self) -> dict[str, Any]:
        """Returns the values as plain data."""
        return asdict(self)


def fewest_machines(sizes: Sequence[tuple[int, Sequence[RankFit]]]) -> int | None:
    """Returns the number of machines from which on every rank fits; None if more machines do not help.

    What is sharded is divided by the number of machines, the rest stays: the need is a + b / machines, a line through
    the two sizes that were planned.

    Args:
        sizes: two numbers of machines, each with the fits of its ranks.
    """
    (few, fits_few), (many, fits_many) = sorted(sizes, key=lambda item: item[0])
    if not fits_few or not fits_many:
        return None
    memory = fits_few[0].available
    need_few, need_many = (max(fit.most for fit in fits) for fits in (fits_few, fits_many))
    if need_few <= memory and few == 1:
        return 1
    if few == many:
        return few if need_few <= memory else None
    sharded = (need_few - need_many) / (1 / few - 1 / many)
    fixed = need_few - sharded / few
    if need_few <= memory and sharded <= 0:
        return 1
    return None if fixed >= memory or sharded <= 0 else max(1, math.ceil(sharded / (memory - fixed)))


def growth_sentence(count: Mapping[str, Any]) -> str | None:
    """Returns a sentence if a step of the machines for a deadline has other tokens than one of the config.

    Args:
        count: a `DeviceCount` as data.

    Example:
        >>> print(growth_sentence({"tokens_per_update": 64, "tokens_before": 32}))
        the step follows the number of devices: 64 tokens in place of the config's 32; global_batch_size keeps its size
    """
    now, before = count["tokens_per_update"], count["tokens_before"]
    if now == before:
        return None
    return (
        f"the step follows the number of devices: {now:,} tokens in place of the config's {before:,}; "
        "global_batch_size keeps its size"
    )
