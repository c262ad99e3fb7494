"""The ranking of the cells of a search: each is one way to train with one size of micro-batches.

Takes `Cell`s with their needs and times; gives those that fit, best first, and for each way that does not fit the cell
that comes nearest.

Units:
    bytes, seconds, tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from forgather.errors import PlanError
from forgather.planner.choices import RECOMPUTE
from forgather.planner.efficiency import Range
from forgather.planner.fit import Verdict
from forgather.planner.memory_plan import format_size

ORDERS = ("tokens", "memory", "price")
"""What a ranking may be ordered by."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to train with one size of micro-batches.

    Args:
        title: the name of the way.
        rows: the rows of a micro-batch.
        micro_batches: the number of micro-batches of an update.
        settings: the settings of the trainer in which it differs from the config.
        verdict: whether each process fits.
        least: the need of the process with the largest need, with the lower bounds of what is assumed.
        most: the same with the upper bounds.
        available: the memory of a device; None if it is unknown.
        largest: the names and sizes of the rows of the plan at the peak, largest first.
        tokens_per_second: the tokens of all devices a second; None if the device has no rates.
        seconds: the time of an update; None if the device has no rates.
        price: the price of a billion tokens; None if no price is given.
        reason: why the cell cannot be used, if it is not its memory: the message of a check or of a trace.
        is_bound: whether `least` is only a lower bound, from the sizes of weights and optimizer state.
        host_bytes: what all processes of a machine offload to its memory.
        is_verified: whether the numbers are those of a trace of this very size, with all blocks of the model.
    """

    title: str
    rows: int
    micro_batches: int
    settings: Mapping[str, Any]
    verdict: Verdict = Verdict.TOO_LARGE
    least: int = 0
    most: int = 0
    available: int | None = None
    largest: tuple[tuple[str, int], ...] = ()
    tokens_per_second: Range | None = None
    seconds: Range | None = None
    price: Range | None = None
    reason: str | None = None
    is_bound: bool = False
    host_bytes: int = 0
    is_verified: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether the cell may fit, and nothing else speaks against it."""
        return self.reason is None and self.verdict is not Verdict.TOO_LARGE

    @property
    def excess(self) -> int:
        """The bytes that a device lacks; 0 if the cell may fit."""
        return 0 if self.available is None else max(0, self.least - self.available)

    def as_data(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        return {**asdict(self), "verdict": str(self.verdict), "excess": self.excess}


def ranked(cells: Iterable[Cell], by: str) -> list[Cell]:
    """Returns the cells that may be used, best first: those that surely fit before those that may fit.

    Args:
        cells: the cells.
        by: "tokens" for the most tokens a second, "memory" for the least need, "price" for the lowest price of a token.
            A range counts by its middle. Where the rates of the device are unknown, "tokens" and "price" put ways
            without offload first, then few micro-batches, then those without recomputation.
    """

    def key(cell: Cell) -> tuple[Any, ...]:
        if cell.tokens_per_second is None and by != "memory":
            recomputes = bool(cell.settings.get(RECOMPUTE))
            slower = cell.host_bytes > 0, cell.micro_batches, recomputes
            return cell.verdict is not Verdict.FITS, *slower, cell.most, cell.title, cell.rows
        speed = _middle(cell.tokens_per_second)
        price = _middle(cell.price) if cell.price is not None else -speed
        first = {"tokens": -speed, "memory": cell.most, "price": price}[by]
        return cell.verdict is not Verdict.FITS, first, -speed, cell.most, cell.title, cell.rows

    return sorted((cell for cell in cells if cell.is_usable), key=key)


def rejections(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the smallest cell of each way that does not fit with it or cannot be used, nearest to fitting first."""
    found: dict[str, Cell] = {}
    for cell in cells:
        if not cell.is_usable and (cell.title not in found or cell.rows < found[cell.title].rows):
            found[cell.title] = cell
    return sorted(found.values(), key=lambda cell: (cell.reason is not None, cell.excess, cell.title))


def rejection_lines(cells: Sequence[Cell], usable: Set[str]) -> list[str]:
    """Returns a line for each way that is rejected; ways with the same reason share one.

    Args:
        cells: what `rejections` returns.
        usable: the titles of the ways that fit with a smaller micro-batch.

    Example:
        >>> ways = ("pipeline 4, 1F1B, recomputed", "pipeline 4, ZBV without recomputation", "DDP, recomputed")
        >>> cells = [Cell(title=way, rows=1, micro_batches=1, settings={}, reason="no") for way in ways]
        >>> rejection_lines(cells, set())
        ['pipeline 4, DDP (3 ways): no']
        >>> gib = 2**30
        >>> cell = Cell(title="FSDP2", rows=4, micro_batches=2, settings={}, least=31 * gib, available=24 * gib,
        ...             largest=(("logits", 12 * gib),))
        >>> rejection_lines([cell], {"FSDP2"})
        ['FSDP2, 4 rows and more: 31.0 GiB of 24.0 GiB, logits 12.0 GiB']
    """
    by_reason: dict[str, list[str]] = {}
    for cell in cells:
        by_reason.setdefault(_reason(cell), []).append(_rejected_title(cell, is_first=cell.title not in usable))
    return [
        f"{titles[0]}: {reason}" if len(titles) == 1 else f"{_common(titles)} ({len(titles)} ways): {reason}"
        for reason, titles in by_reason.items()
    ]


def _common(titles: Sequence[str]) -> str:
    """Returns what ways divide, without how each schedules and recomputes."""
    return ", ".join(dict.fromkeys(title.removesuffix(" without recomputation").split(",")[0] for title in titles))


def _rejected_title(cell: Cell, *, is_first: bool) -> str:
    return cell.title if is_first else f"{cell.title}, {cell.rows} rows and more"


def _reason(cell: Cell) -> str:
    if cell.reason is not None:
        return cell.reason
    need = f"{'at least ' if cell.is_bound else ''}{format_size(cell.least)} of {format_size(cell.available or 0)}"
    rows = "".join(f", {name} {format_size(size)}" for name, size in cell.largest[:1])
    return f"{need}{rows}"


def refuse_if_nothing_fits(cells: Sequence[Cell]) -> None:
    """Raises an error if no cell may be used.

    Raises:
        PlanError: FG992, with the way that comes nearest, and by how much it misses.
    """
    if any(cell.is_usable for cell in cells):
        return
    lacking = [cell for cell in cells if cell.reason is None and not cell.is_bound] or [
        cell for cell in cells if cell.reason is None
    ]
    if not lacking:
        raise PlanError(
            "none of the ways to train this config can be used",
            code="FG992",
            hint="; ".join(dict.fromkeys(f"{cell.title}: {cell.reason}" for cell in cells[:3])),
        )
    nearest = min(lacking, key=lambda cell: cell.least)
    largest = ", ".join(f"{name} {format_size(size)}" for name, size in nearest.largest[:3])
    need, memory = format_size(nearest.least), format_size(nearest.available or 0)
    raise PlanError(
        f"nothing fits: the nearest way is {nearest.title} with micro-batches of {_rows(nearest.rows)}, which needs "
        f"{need} of {memory}, {format_size(nearest.excess)} too much",
        code="FG992",
        hint=f"its largest rows: {largest}. Use more or larger devices, shorter rows, rows "
        "divided over several devices (context_parallel_size), an adapter, or a smaller model" + _refused(cells),
    )


def _refused(cells: Sequence[Cell]) -> str:
    """Returns a sentence about the ways that were not planned, with the reason of the first one."""
    reasons = {cell.title: cell.reason for cell in cells if cell.reason is not None}
    if not reasons:
        return ""
    title, reason = next(iter(reasons.items()))
    ways = "1 way was" if len(reasons) == 1 else f"{len(reasons)} ways were"
    return f". {ways} not planned, such as {title}: {reason}"


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


def _middle(bounds: Range | None) -> float:
    return 0.0 if bounds is None else (bounds.low + bounds.high) / 2
