"""The efficiencies of a device, fitted to steps that were measured.

The input is the work of several runs with the seconds of their steps, the device, and efficiencies to start from; the
output is a `Calibration`. The fit knows nothing about how times are composed: it varies efficiencies and asks
`step_time`. One run cannot tell kinds of work apart, so first all of them get one common factor. A kind gets a factor
of its own only if that explains differences between runs, and if there are at least two runs for each number that is
fitted. All factors are above 0, because their logarithms are fitted. A run that is far from all others counts by its
distance, and not by the square of it.

Units:
    seconds; errors are shares of the measured time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forgather.ml.planner.pipeline_step import schedule_seconds
from forgather.planner.efficiency import EFFICIENCIES, Efficiency
from forgather.planner.hardware import Hardware
from forgather.planner.step_time import step_time
from forgather.planner.work import RunWork

Vector = NDArray[np.float64]
Planned = Callable[[Vector], Vector]
"""Returns the logarithms of the planned seconds of all runs from the logarithms of the factors."""

_STEPS = 40
_DIFFERENCE = 1e-3
_CONVERGED = 1e-6
_OUTLIER = 0.2  # an error above this counts by its size, and one below it by its square
_TRIED = (-2.0, -1.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0)  # logarithms of a factor next to the common one
_EXPLAINED = 0.7  # one more factor must make the squared error for each degree of freedom smaller by this factor
_GOOD_ENOUGH = 0.01  # errors below this are not explained any further


class MeasuredStep(NamedTuple):
    """A run whose steps were measured.

    Args:
        work: the work of one optimizer step.
        seconds: the time of one optimizer step.
    """

    work: RunWork
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted efficiencies.

    Args:
        efficiency: one number for each range.
        fitted: the names of the efficiencies with a factor of their own, in the order in which they were fitted. All
            others have the common factor.
        planned: the seconds of a step of each run, planned with these efficiencies.
    """

    efficiency: Efficiency
    fitted: tuple[str, ...]
    planned: tuple[float, ...]


def calibrate(runs: Sequence[MeasuredStep], hardware: Hardware, start: Efficiency) -> Calibration:
    """Returns the efficiencies with which the planned times of steps are nearest to the measured ones.

    Args:
        runs: the runs, at least one.
        hardware: the device of each process of all runs.
        start: the efficiencies to start from, whose middles are used.
    """
    measured = np.log([run.seconds for run in runs])

    def planned(factors: Vector) -> Vector:
        slowed = start.slowed(_by_name(factors), "")
        return np.log([_seconds(run.work, hardware, slowed) for run in runs])

    factors, directions = np.zeros(len(EFFICIENCIES)), np.ones((1, len(EFFICIENCIES)))
    factors = _nearest(planned, measured, directions, factors)
    fitted: list[str] = []
    while 2 * (len(directions) + 1) <= len(runs):
        found = _with_one_more(planned, measured, directions, factors)
        if found is None:
            break
        factors, directions, own = found
        fitted.append(EFFICIENCIES[own])
    return Calibration(
        efficiency=start.slowed(_by_name(factors), "calibrated"),
        fitted=tuple(fitted),
        planned=tuple(np.exp(planned(factors)).tolist()),
    )


def _by_name(factors: Vector) -> dict[str, float]:
    return dict(zip(EFFICIENCIES, np.exp(factors).tolist(), strict=True))


def _seconds(work: RunWork, hardware: Hardware, efficiency: Efficiency) -> float:
    return step_time(work, hardware, efficiency, simulate=schedule_seconds).seconds.middle


def _loss(planned: Planned, measured: Vector, factors: Vector) -> float:
    return float((_bent(planned(factors) - measured) ** 2).sum())


def _bent(errors: Vector) -> Vector:
    """Returns the signed roots of Huber's loss of errors."""
    sizes = np.abs(errors)
    beyond = np.sqrt(np.maximum(0, 2 * _OUTLIER * sizes - _OUTLIER**2))
    bent: Vector = np.sign(errors) * np.where(sizes <= _OUTLIER, sizes, beyond)
    return bent


def _nearest(planned: Planned, measured: Vector, directions: Vector, factors: Vector) -> Vector:
    """Returns the factors with the least errors, moved along the directions by damped Gauss-Newton steps."""
    amounts = np.zeros(len(directions))

    def errors(amounts: Vector) -> Vector:
        return _bent(planned(factors + amounts @ directions) - measured)

    now, damping = errors(amounts), 1e-3
    for _ in range(_STEPS):
        moved = [errors(amounts + _DIFFERENCE * unit) for unit in np.eye(len(amounts))]
        slopes = (np.array(moved) - now).T / _DIFFERENCE
        damped = np.vstack([slopes, math.sqrt(damping) * np.eye(len(amounts))])
        step = np.linalg.lstsq(damped, np.concatenate([-now, np.zeros(len(amounts))]), rcond=None)[0]
        then = errors(amounts + step)
        if then @ then < now @ now:
            amounts, now, damping = amounts + step, then, damping / 4
        else:
            damping *= 8
        if np.abs(step).max() < _CONVERGED:
            break
    nearest: Vector = factors + amounts @ directions
    return nearest


def _with_one_more(
    planned: Planned, measured: Vector, directions: Vector, factors: Vector
) -> tuple[Vector, Vector, int] | None:
    """Returns the factors with the one more that explains most, the directions, and its number; None if none does.

    What is 1 % of a time now may turn out to be most of it, and the slopes here do not show that: each factor is tried
    at several sizes.
    """
    best = None
    for own, unit in enumerate(np.eye(len(EFFICIENCIES))):
        if any((unit == direction).all() for direction in directions):
            continue
        sizes = {}
        for size in _TRIED:
            errors = planned(factors + size * unit) - measured
            # The common factor takes up the median of what changes.
            sizes[size] = float((_bent(errors - np.median(errors)) ** 2).sum())
        more = np.vstack([directions, unit])
        found = _nearest(planned, measured, more, factors + min(sizes, key=lambda size: sizes[size]) * unit)
        loss = _loss(planned, measured, found)
        if best is None or loss < best[0]:
            best = loss, found, more, own
    if best is None:
        return None
    loss, found, more, own = best
    before = _loss(planned, measured, factors) / (len(measured) - len(directions))
    explains = loss / (len(measured) - len(more)) < _EXPLAINED * before
    return (found, more, own) if explains and before > _GOOD_ENOUGH**2 else None
