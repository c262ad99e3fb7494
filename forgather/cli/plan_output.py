"""A memory plan as text: the rows of each phase with bars, for the rank with the largest peak first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgather.planner.grid import largest_batch_sentences
from forgather.planner.memory_plan import format_size
from forgather.planner.ways_out import way_lines

_BAR = 24
_DEVICES = {"cpu": "CPUs (--hardware names a GPU)", "cuda": "GPUs"}


def plan_lines(found: Mapping[str, Any]) -> list[str]:
    """Returns a memory plan as lines of text.

    Args:
        found: the plan as data, see `forgather.planner.memory_plan.MemoryPlan`.
    """
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1) or "one process"
    trained = "" if found["trainable"] == found["parameters"] else f", {_count(found['trainable'])} trained"
    tokens = "" if found["tokens_per_row"] is None else f" of {found['tokens_per_row']} tokens"
    rows = found["rows_per_update"]
    lines = [
        f"processes   {found['world_size']}: {mesh}  ({found['strategy']}), on {_DEVICES[found['device_type']]}",
        f"model       {_count(found['parameters'])} parameters{trained}",
        f"update      {rows} row{'' if rows == 1 else 's'}{tokens}",
    ]
    for rank in found["ranks"]:
        lines += ["", *_rank_lines(rank, found["world_size"])]
    for title, rows in (("memory of each machine", found["host"]), ("disk", found["disk"])):
        if rows:
            lines += ["", title, *_bounded_lines(rows)]
    lines += [f"note: {note}" for note in found["notes"]]
    return lines


def _rank_lines(rank: Mapping[str, Any], world_size: int) -> list[str]:
    who = _who(rank["ranks"], world_size)
    stages = f", stage {', '.join(map(str, rank['stages']))}" if rank["stages"] else ""
    largest = max(rank["phases"], key=lambda phase: phase["num_bytes"])
    lines = [f"{who}{stages}: peak {format_size(largest['num_bytes'])}"]
    for phase in rank["phases"]:
        lines.append(f"  {phase['phase']}: {format_size(phase['num_bytes'])}, in the {phase['at']}")
        width = max((len(row["name"]) for row in phase["rows"]), default=0)
        for row in phase["rows"]:
            share = row["num_bytes"] / max(1, phase["num_bytes"])
            bar = "#" * round(share * _BAR)
            size = format_size(row["num_bytes"])
            lines.append(f"    {row['name']:<{width}}  {size:>9}  {share:>4.0%}  {row['source']:<7}  {bar}".rstrip())
    if rank["least_bytes"] is not None:
        least = format_size(rank["least_bytes"])
        lines.append(
            f"  about {least} if blocks recompute all: activation_memory_budget lets torch choose what they keep"
        )
    if rank["host"]:
        rows = ", ".join(f"{row['name']} {format_size(row['num_bytes'])}" for row in rank["host"])
        whole = format_size(sum(row["num_bytes"] for row in rank["host"]))
        lines.append(f"  in addition, in the memory of the host: {whole} ({rows})")
    return lines


def fit_lines(fit: Mapping[str, Any] | None, world_size: int) -> list[str]:
    """Returns lines that say whether the processes of a plan fit on a device; none if no device is known.

    Args:
        fit: the result of `forgather.launch.planning.fit_on`.
        world_size: the number of processes of the plan.
    """
    if fit is None:
        return []
    device = fit["hardware"]
    if device["memory_bytes"] is None:
        return ["", f"on {device['title']}: the table has no memory for it, so the plan does not say what fits"]
    held = f", of which {format_size(fit['held_bytes'])} are held already" if fit["held_bytes"] else ""
    lines = ["", f"on {device['title']}: {format_size(device['memory_bytes'])} a device{held}"]
    for rank in fit["ranks"]:
        lines += _rank_fit_lines(rank, world_size)
    return lines + _way_lines(fit.get("ways_out"), fit.get("search"))


def _way_lines(ways: Sequence[Mapping[str, Any]] | None, search: str | None) -> list[str]:
    if ways is None:
        return []
    lines = way_lines(ways)
    further = [f"  all strategies are searched by: {search}"] if search else []
    if not lines:
        return ["  no change of the config that was planned makes the run smaller", *further]
    if any(way["verdict"] == "fits" for way in ways):
        nothing, further = "", []
    else:
        nothing = ", none of which surely fits"
    return [f"  the nearest ways out, each planned{nothing}:", *(f"    {line}" for line in lines), *further]


def row_lines(found: Mapping[str, Any] | None) -> list[str]:
    """Returns the largest batch within a limit as lines of text.

    Args:
        found: the answer as data, see `forgather.launch.planning.rows_within`; None if it was not requested.
    """
    if found is None:
        return []
    first, *others = largest_batch_sentences(found)
    return ["", first, *(f"  {one}" for one in others)]


def _rank_fit_lines(rank: Mapping[str, Any], world_size: int) -> list[str]:
    least, most, available = rank["least"], rank["most"], rank["available"]
    need = _between(least, most)
    if rank["verdict"] == "fits":
        margin = f"at least {format_size(available - most)} stay free"
    elif rank["verdict"] == "may fit":
        margin = f"between {format_size(available - least)} free and {format_size(most - available)} too much"
    else:
        margin = f"at least {format_size(least - available)} too much"
    lines = [f"  {_who(rank['ranks'], world_size)}: {rank['verdict']}. It needs {need}; {margin}"]
    lines += [f"    {_fit_bar(rank)}", *(f"  {line}" for line in _bounded_lines(rank["overheads"]))]
    if rank["verdict"] != "fits":
        lines.append(f"    the largest row is {rank['largest']}, {format_size(rank['largest_bytes'])}")
    return lines


def _fit_bar(rank: Mapping[str, Any]) -> str:
    """Returns a bar: tensors as '#', what is assumed on top of them as '+' and at most as '-', the device as '|'.

    Example:
        >>> _fit_bar({"peak_bytes": 6, "least": 8, "most": 9, "available": 12})
        '|########################++++++++----            |'
    """
    whole = max(rank["most"], rank["available"], 1)
    ends = [round(rank[name] / whole * 2 * _BAR) for name in ("peak_bytes", "least", "most")]
    # Torch may recompute a part of the peak.
    ends[0] = min(ends[:2])
    bar = "".join(mark * (end - start) for mark, start, end in zip("#+-", [0, *ends], ends, strict=False))
    place = round(rank["available"] / whole * 2 * _BAR)
    bar = bar.ljust(place)
    return f"|{bar[:place]}|{bar[place:]}"


def _bounded_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    width = max((len(row["name"]) for row in rows), default=0)
    bounds = [_between(row["least"], row["most"]) for row in rows]
    wide = max(map(len, bounds), default=0)
    return [
        f"  {row['name']:<{width}}  {size:>{wide}}  {row['source']:<7}  {row['basis']}"
        for row, size in zip(rows, bounds, strict=True)
    ]


def _between(least: float, most: float) -> str:
    return format_size(least) if least == most else f"{format_size(least)} to {format_size(most)}"


def _who(ranks: Sequence[int], world_size: int) -> str:
    first, last = ranks
    return "each process" if (first, last) == (0, world_size - 1) else f"rank {first}" + f"-{last}" * (last > first)


def _count(number: float) -> str:
    for unit, least in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= least:
            return f"{number / least:.3g}{unit}"
    return str(int(number))
