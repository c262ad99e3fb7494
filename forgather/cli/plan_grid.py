"""`fgcli plan --grid` and `--longest`: their options, and what they found as text."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from forgather.launch.sequences import STEP
from forgather.planner.grid import MOST_CELLS, Axes, longest_sentence, parse_axes, reasons, table_of
from forgather.planner.memory_plan import format_size


def add_grid(parser: argparse.ArgumentParser) -> None:
    """Adds the options about lengths of rows."""
    parser.add_argument(
        "--grid",
        nargs="?",
        const=Axes(),
        type=_axes,
        metavar="LENGTHSxROWS",
        help="also plan other lengths of rows x rows of a micro-batch, as 2048,4096x1,2,4; 2048,4096 or x1,2,4 gives "
        "one side (default: half, twice and four times the config's values)",
    )
    parser.add_argument(
        "--longest",
        nargs="?",
        const=STEP,
        type=_step,
        metavar="STEP",
        help=f"also find the longest rows that fit, in steps of STEP tokens (default: {STEP}); with --hardware or "
        "--memory",
    )


def _axes(text: str) -> Axes:
    axes = parse_axes(text)
    if axes is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not LENGTHSxROWS, as in 2048,4096x1,2,4")
    if (number := max(1, len(axes.lengths)) * max(1, len(axes.rows))) > MOST_CELLS:
        raise argparse.ArgumentTypeError(f"{text!r} has {number} cells, and {MOST_CELLS} are planned at most")
    return axes


def _step(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text[:10]) < 10**9:
        return int(text[:10])
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens above 0")


def grid_lines(grid: Mapping[str, Any] | None) -> list[str]:
    """Returns a grid as lines of text; an empty list if it was not requested.

    Args:
        grid: the grid as data, see `forgather.launch.sequences.grid_of`; None if it was not requested.
    """
    if grid is None:
        return []
    heads, cells = table_of(grid)
    table = [["tokens", *heads]]
    table += [[f"{length:,}", *map(cell_text, line)] for length, line in cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    speeds = any(cell["tokens_per_second"] for cell in grid["cells"])
    lines = [
        "",
        f"tokens of a row ({grid['setting']}) x rows of a micro-batch: peak of a process"
        + (", tokens a second" if speeds else ""),
    ]
    for row in table:
        first, *others = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        lines.append("  ".join(["  " + first, *others]).rstrip())
    return lines + [f"  {reason}" for reason in reasons(grid)]


def cell_text(cell: Mapping[str, Any]) -> str:
    """Returns a cell of a grid in words.

    Example:
        >>> cell_text({"peak_bytes": 2**30, "verdict": "fits", "tokens_per_second": {"low": 900.0, "high": 1100.0}})
        '1.0 GiB fits, 900-1,100'
    """
    if cell["peak_bytes"] is None:
        return "-"
    verdict = f" {cell['verdict']}" if cell["verdict"] else ""
    speed = cell["tokens_per_second"]
    return format_size(cell["peak_bytes"]) + verdict + (f", {speed['low']:,.0f}-{speed['high']:,.0f}" if speed else "")


def longest_lines(found: Mapping[str, Any] | None) -> list[str]:
    """Returns the longest rows as lines of text; an empty list if they were not requested.

    Args:
        found: the answer as data, see `forgather.launch.sequences.longest_of`; None if it was not requested.
    """
    if found is None:
        return []
    return ["", longest_sentence(found)]
