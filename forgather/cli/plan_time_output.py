"""The time of a plan as text: a step by kinds of work, the run, and the number of devices for a deadline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgather.planner.device_count import growth_sentence

_BAR = 24


def time_lines(time: Mapping[str, Any] | None, world_size: int) -> list[str]:
    """Returns lines that say how long a step and the run take; none if no device is known.

    Args:
        time: the result of `forgather.launch.planning.time_of`.
        world_size: the number of processes of the plan.
    """
    if time is None:
        return []
    step, run = time["step"], time["run"]
    lines = ["", f"a step takes {_between(step['seconds'], _duration)}"]
    width = max(len(kind) for kind in step["rows"])
    for kind, seconds in step["rows"].items():
        bar = "#" * round(seconds["high"] / step["seconds"]["high"] * _BAR)
        lines.append(f"    {kind:<{width}}  {_between(seconds, _duration):<22}  {bar}".rstrip())
    mfu = {bound: 100 * share for bound, share in step["mfu"].items()}
    a_second = step["tokens_per_second"]
    a_day = {bound: 86400 * number for bound, number in a_second.items()}
    executed = _amount(step["executed_flops"])
    lines += [
        f"  FLOPs of a step  {_amount(step['model_flops'])} of the model, {executed} executed",
        f"  MFU              {_between(mfu, '{:.3g}'.format)} % of {_amount(step['peak_flops'])}/s a device",
        f"  tokens           {_between(a_second, _amount)} a second, {_between(a_day, _amount)} a day",
    ]
    if run is not None:
        price = "" if run["price"] is None else f", price {_between(run['price'], '{:,.0f}'.format)}"
        devices = "" if world_size == 1 else f", {_between(run['gpu_hours'], _amount)} device hours"
        steps = f"{run['num_updates']:,} step{'' if run['num_updates'] == 1 else 's'}"
        hours = {bound: 3600 * number for bound, number in run["hours"].items()}
        lines.append(
            f"  run              {steps}, {_amount(run['tokens'])} tokens: {_between(hours, _duration)}{devices}{price}"
        )
    return lines + [f"  assumed: {sentence}" for sentence in step["assumptions"]]


def device_count_lines(count: Mapping[str, Any] | None, days: float | None) -> list[str]:
    """Returns lines that say how many devices a deadline needs; an empty list without a deadline.

    Args:
        count: the result of `forgather.launch.time_planning.device_count_of`; None without a deadline.
        days: the days until the deadline.
    """
    if count is None:
        return []
    size = count["devices_per_machine"]

    def machines(number: float) -> str:
        devices = int(number) * size
        return f"{int(number)} machine{'' if number == 1 else 's'} ({devices} device{'' if devices == 1 else 's'})"

    memory = count["by_memory"]
    by_memory = (
        "no number of machines was found that makes it fit" if memory is None else f"at least {machines(memory)}"
    )
    fewest, most = count["by_time"]["low"], count["by_time"]["high"]
    by_time = machines(fewest) if fewest == most else f"{machines(fewest)} to {machines(most)}"
    why = [f"  more could not be planned: {count['why_fewer']}"] if count["why_fewer"] else []
    return [
        "",
        f"in {days:g} days",
        f"  by time    {by_time}",
        f"  by memory  {by_memory}",
        f"  {machines(count['planned'])}: {_between(count['days'], _digits)} days, "
        f"{_amount(count['tokens_per_update'])} tokens in a step; memory: {count['verdict']}",
        *([f"  {grown}"] if (grown := growth_sentence(count)) else []),
        *why,
    ]


def _between(bounds: Mapping[str, float], words: Any) -> str:
    low, high = words(bounds["low"]), words(bounds["high"])
    return low if low == high else f"{low} to {high}"


def _duration(seconds: float) -> str:
    for unit, least in (("days", 2 * 86400), ("hours", 2 * 3600), ("min", 120), ("s", 1), ("ms", 1e-3)):
        if seconds >= least:
            per = {"days": 86400, "hours": 3600, "min": 60, "s": 1, "ms": 1e-3}[unit]
            return f"{_digits(seconds / per)} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _digits(number: float) -> str:
    """Returns a number with three digits that count, and never with an exponent."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def _amount(number: float) -> str:
    for unit, least in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= least:
            return f"{number / least:.3g}{unit}"
    return f"{number:.3g}"
