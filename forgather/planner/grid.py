"""A grid of plans: lengths of rows by numbers of rows, each cell with its peak, whether it fits, and its speed.

Takes the axes as text and the plan of each cell as data; gives cells as plain values.

Units:
    tokens, rows, bytes, tokens/s of all processes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from forgather.planner.efficiency import Range
from forgather.planner.fit import RankFit, Verdict, worst_fit
from forgather.planner.memory_plan import format_size

MOST_CELLS = 100
_FACTORS = (0.5, 1, 2, 4)


class Axes(NamedTuple):
    """The axes of a grid.

    Args:
        lengths: the numbers of tokens of a row; empty for those around the length of the config.
        rows: the numbers of rows of a micro-batch; empty for those around the number of the config.
    """

    lengths: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    def around(self, length: int, rows: int) -> Axes:
        """Returns the axes with half, twice and four times the values of a config where none are given."""
        return Axes(self.lengths or _around(length), self.rows or _around(rows))


def parse_axes(text: str) -> Axes | None:
    """Returns the axes of a text such as 2048,4096x1,2,4; None if it is not one. Either side may be empty.

    Example:
        >>> parse_axes("4096,2048x1,2")
        Axes(lengths=(2048, 4096), rows=(1, 2))
        >>> parse_axes("x8"), parse_axes("2048x0")
        (Axes(lengths=(), rows=(8,)), None)
    """
    sides = text.split("x")
    numbers = [[part.strip() for part in side.split(",")] if side else [] for side in sides]
    if len(sides) > 2 or not all(
        part.isascii() and part.isdigit() and len(part) < 10 for side in numbers for part in side
    ):
        return None
    found = Axes(*(tuple(sorted({int(part) for part in side})) for side in numbers))
    is_whole = (found.lengths or found.rows) and 0 not in (*found.lengths, *found.rows)
    return found if is_whole else None


def _around(value: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, int(value * factor)) for factor in _FACTORS}))


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A cell of a grid.

    Args:
        length: the number of tokens of each row.
        rows: the number of rows of a micro-batch.
        micro_batches: the number of micro-batches of an update.
        peak_bytes: the planned peak of the rank with the largest one; None if the cell is not planned.
        verdict: whether the cell fits; None if nothing limits the memory, or if the cell is not planned.
        least: the need of the rank with the lower bounds of what is assumed.
        most: the same with the upper bounds.
        tokens_per_second: the speed of all processes together; None if no device is known.
        reason: why the cell is not planned; None if it is.
        note: why a run of this size would be refused all the same; None if it would not.
    """

    length: int
    rows: int
    micro_batches: int = 0
    peak_bytes: int | None = None
    verdict: Verdict | None = None
    least: int | None = None
    most: int | None = None
    tokens_per_second: Range | None = None
    reason: str | None = None
    note: str | None = None

    def as_data(self) -> dict[str, Any]:
        """Returns the cell as plain data."""
        return asdict(self)

    def planned(self, plan: Mapping[str, Any], fits: Sequence[RankFit], limit: int | None) -> GridCell:
        """Returns this cell with the peak of its plan, and whether it fits.

        Args:
            plan: the plan as data.
            fits: whether each rank fits on a device; empty if the memory of none is known.
            limit: the bytes that the tensors of a process may take; None leaves it to the device.
        """
        peak = max(phase["num_bytes"] for phase in plan["ranks"][0]["phases"])
        if limit is not None:
            verdict = Verdict.FITS if peak <= limit else Verdict.TOO_LARGE
            return replace(self, peak_bytes=peak, verdict=verdict, least=peak, most=peak)
        worst = worst_fit(fits)
        if worst is None:
            return replace(self, peak_bytes=peak, least=peak, most=peak)
        return replace(self, peak_bytes=peak, verdict=worst.verdict, least=worst.least, most=worst.most)


class GridTable(NamedTuple):
    """The cells of a grid by their place in a table.

    Args:
        heads: the heads of the columns, such as "2 rows".
        lines: the length of each line, with its cells.
    """

    heads: list[str]
    lines: list[tuple[int, list[Mapping[str, Any]]]]


def table_of(grid: Mapping[str, Any]) -> GridTable:
    """Returns a grid as a table: a line for each length, and a column for each number of rows.

    Args:
        grid: the grid as data, with its cells as `GridCell.as_data` gives them.
    """
    cells = {(cell["length"], cell["rows"]): cell for cell in grid["cells"]}
    sizes = dict.fromkeys(rows for _, rows in cells)
    lengths = dict.fromkeys(length for length, _ in cells)
    return GridTable([*map(_rows, sizes)], [(length, [cells[length, rows] for rows in sizes]) for length in lengths])


def reasons(grid: Mapping[str, Any]) -> list[str]:
    """Returns why cells of a grid are not planned, or would not run, each reason once with its first cell.

    Args:
        grid: the grid as data, with its cells as `GridCell.as_data` gives them.
    """
    found: dict[str, str] = {}
    for cell in grid["cells"]:
        size = f"{cell['length']:,} tokens x {_rows(cell['rows'])}"
        if cell["reason"] is not None:
            found.setdefault(cell["reason"], f"not planned: {size}: {cell['reason']}")
        elif cell["note"] is not None:
            found.setdefault(cell["note"], f"note: {size}: {cell['note']}")
    return list(found.values())


def too_few_rows(rows: int, most_rows: int | None) -> str | None:
    """Returns a sentence if the training data has fewer rows than a micro-batch of each replica.

    Args:
        rows: the number of rows of a micro-batch.
        most_rows: the largest number for which the data suffices; None if it is unknown.

    Example:
        >>> too_few_rows(64, 8)
        "the training data has 8 rows for each replica: 'fgcli train' refuses a micro-batch of 64 rows (FG804)"
    """
    if most_rows is None or rows <= most_rows:
        return None
    return (
        f"the training data has {_rows(most_rows)} for each replica: 'fgcli train' refuses a micro-batch of "
        f"{_rows(rows)} (FG804)"
    )


def largest_batch_sentences(found: Mapping[str, Any]) -> list[str]:
    """Returns the largest batch within a limit as sentences.

    Args:
        found: the answer as data, see `forgather.launch.planning.rows_within`.
    """
    limit, need, size = found["limit"], found["num_bytes"], found["size"]
    if size == 0:
        least = "one row needs" if found["unit"] == 1 else f"{found['unit']} rows need"
        over = format_size(need - limit)
        return [f"no batch fits into {format_size(limit)}: {least} {format_size(need)}, {over} too much"]
    following = found["next_bytes"]
    if following is not None:
        more = f"; {size + found['unit']} need {format_size(following - limit)} more than the limit"
    else:
        more = "; more are not tried" if found["is_exact"] else ""
    chunks = "" if found["pipeline_chunks"] is None else f" with pipeline_chunks {found['pipeline_chunks']}"
    least = "" if found["is_exact"] else "at least "
    refused = too_few_rows(size, found["most_rows"])
    return [
        f"largest batch within {format_size(limit)}: {least}{size} rows{chunks}, {format_size(need)}{more}",
        "this is what the run allocates; --hardware adds a GPU's context, workspaces and fragmentation",
        *([] if refused is None else [refused]),
    ]


def longest_sentence(found: Mapping[str, Any]) -> str:
    """Returns the longest rows that fit as a sentence.

    Args:
        found: the answer as data: a `LargestSize` in tokens, with `limit`, `step`, `rows` and `setting`.
    """
    limit, size, rows = format_size(found["limit"]), found["size"], f"{_rows(found['rows'])} of a micro-batch"
    if size == 0:
        over = format_size(found["num_bytes"] - found["limit"])
        return f"no length fits into {limit} with {rows}: {found['step']:,} tokens need {over} too much"
    if found["is_bound_by_positions"]:
        more = f"the bound is max_position_embeddings of the model, {found['max_positions']:,}, not memory"
    elif found["next_bytes"] is not None:
        more = f"{size + found['step']:,} need {format_size(found['next_bytes'])}"
    else:
        more = "longer ones were not tried"
    least = "" if found["is_exact"] else "at least "
    need = format_size(found["num_bytes"])
    return f"longest rows within {limit} with {rows}: {least}{size:,} tokens ({found['setting']}), {need}; {more}"


def _rows(number: int) -> str:
    return f"{number:,} row{'' if number == 1 else 's'}"
