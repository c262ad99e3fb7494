"""The time and the price of a whole run, and the number of devices that a deadline needs.

Units:
    hours, days, tokens; the price is in the currency that the user gives it in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forgather.errors import PlanError
from forgather.planner.efficiency import Range
from forgather.planner.hardware import Hardware
from forgather.planner.step_time import StepTime, check_rates
from forgather.planner.work import RunWork


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """The time of a run.

    Args:
        num_updates: the number of optimizer steps.
        tokens: the number of tokens; of rows if rows have no tokens.
        hours: the time of the run.
        gpu_hours: the same over all devices.
        price: the price of the run; None if no price of a GPU hour is known.
    """

    num_updates: int
    tokens: int
    hours: Range
    gpu_hours: Range
    price: Range | None = None

    def as_data(self) -> dict[str, Any]:
        """Returns the values as plain data."""
        return asdict(self)


def run_time(work: RunWork, step: StepTime, *, tokens: float | None, price: float | None) -> RunTime | None:
    """Returns the time of a run; None if neither the config nor the caller says how long the run is.

    Args:
        work: the work of the run.
        step: the time of one step.
        tokens: the number of tokens to train on; None for the number of steps of the config.
        price: the price of a GPU hour; None if it is unknown.
    """
    per_update = work.rows_per_update * (work.tokens_per_row or 1)
    updates = work.num_updates if tokens is None else math.ceil(tokens / per_update)
    if updates is None:
        return None
    hours = step.seconds.times(updates / 3600)
    gpu_hours = hours.times(work.world_size)
    return RunTime(
        num_updates=updates,
        tokens=round(updates * per_update),
        hours=hours,
        gpu_hours=gpu_hours,
        price=None if price is None else gpu_hours.times(price),
    )


def machines_for(work: RunWork, step: StepTime, *, tokens: float, days: float) -> Range:
    """Returns the number of machines that train on a number of tokens within some days.

    Each device does the same work in a step whatever their number, so that the number follows from the device seconds
    of a token. Messages of another number of devices take another time: plan that number again.

    Args:
        work: the work of the run.
        step: the time of one step.
        tokens: the number of tokens.
        days: the days.
    """
    per_update = work.rows_per_update * (work.tokens_per_row or 1)
    needed = step.seconds.times(work.world_size / per_update * tokens / (days * 86400) / work.local_world_size)
    return Range(math.ceil(needed.low), math.ceil(needed.high))


def check_amounts(*, tokens: float | None, days: float | None, price: float | None) -> None:
    """Raises an error if the amounts of a command contradict one another.

    Args:
        tokens: the tokens of the run.
        days: the days until its end.
        price: the price of a GPU hour.

    Raises:
        PlanError: FG991 if an amount is not above 0, or needs another one that is missing.
    """
    for name, value in (("--tokens", tokens), ("--days", days), ("--price", price)):
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"{name} is {value:g}", code="FG991", hint="give a number above 0")
    if days is not None and tokens is None:
        raise PlanError(
            "--days needs the tokens of the run",
            code="FG991",
            hint="add --tokens, for example --tokens 300e9",
        )


def check_device(amounts: Mapping[str, float | None], device: Hardware | None) -> None:
    """Raises an error if amounts are given and no time follows from the device.

    Args:
        amounts: the amounts of a command, by the names of their options.
        device: the device of each process; None if it is unknown.

    Raises:
        PlanError: FG990 if the facts of the device give no times; FG991 if there is no device.
    """
    for name in (name for name, value in amounts.items() if value is not None):
        if device is None:
            raise PlanError(
                f"--{name} needs a device", code="FG991", hint="add --hardware, for example --hardware h200"
            )
        check_rates(device)
