"""A selection of hardware and strategy, and the cells of a benchmark, as text."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from forgather.planner.benchmark_results import Row
from forgather.planner.memory_plan import format_size

_ROWS = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "overhead")


def selection_lines(found: Mapping[str, Any]) -> list[str]:
    """Returns a selection as lines of text.

    Args:
        found: what `forgather.planner.selection.HardwareSelector.select_hardware_for_task` returns.
    """
    gpus, rows, passes = (found[key] for key in ("gpu_count", "per_gpu_batch_size", "gradient_accumulation_steps"))
    memory = found["estimated_memory"]
    dtype = found["mixed_precision_dtype"]
    others = f"; then {', '.join(found['fallback_options'])}" if found["fallback_options"] else ""
    lines = [
        f"model      {found['model_name']}, rows of {found['sequence_length']} tokens",
        f"hardware   {found['primary_recommendation']}{others}",
        f"strategy   {found['summary']}",
        f"update     {_plural(gpus, 'GPU')} x {_plural(rows, 'row')} x {_plural(passes, 'pass', 'es')} = "
        f"{_plural(found['global_batch_size'], 'row')}",
        f"precision  {'32-bit' if dtype == 'no' else f'mixed, {dtype} (as {dtype}=True)'}",
        f"memory     {_size(memory['per_gpu_gb'])} on each GPU at the peak, by formula"
        + (f"; {_size(memory['host_gb'])} of the host for each" if memory["host_gb"] else ""),
    ]
    lines += [f"  {name:<14}{_size(memory[f'{name}_gb']):>10}" for name in _ROWS]
    lines += [f"note: {note}" for note in found["assumed"]]
    return lines + [f"note: {name} is left out: {reason}" for name, reason in found["unsuitable"].items()]


def _size(gigabytes: float) -> str:
    return format_size(gigabytes * 1e9)


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{ending * (count != 1)}"


def benchmark_lines(cells: list[Mapping[str, Any]]) -> list[str]:
    """Returns the cells of a benchmark as lines of a table.

    Args:
        cells: the cells, as `forgather.planner.benchmark` makes them.
    """
    return _aligned([("cell", "rows", "planned GB", "strategy"), *(_benchmark_row(cell) for cell in cells)])


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _benchmark_row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    config = cell.get("config")
    if config is None:
        return cell["name"], "", "", f"not planned: {cell['reason']}"
    planned = f"{config['estimated_memory']['per_gpu_gb']:.2f}"
    return cell["name"], str(config["global_batch_size"]), planned, config["summary"]


_FIGURES = (
    ("step_seconds", "step s", "{:.3g}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("peak_gb", "GB", "{:.3g}"),
)


def result_lines(rows: Sequence[Row]) -> list[str]:
    """Returns the results of a benchmark as lines of a table: planned and measured figures, or a reason.

    Args:
        rows: the results.
    """
    header = ["cell", *(f"{one} {title}" for _, title, _ in _FIGURES for one in ("planned", "measured")), "result"]
    table = [header, *(_result_row(row) for row in rows)]
    planned_for = dict.fromkeys(
        row.cell["config"]["device"] for row in rows if row.measured and row.measured["device"] == "cpu"
    )
    notes = ["note: planned GB are tensors by formula, without context and fragmentation; measured GB are tensors too"]
    notes += [f"note: planned for {name}, measured on the CPU of this machine" for name in planned_for]
    return [*_aligned(table), *(notes if any(row.measured for row in rows) else [])]


def _result_row(row: Row) -> list[str]:
    planned, words = row.planned, [row.cell["name"]]
    for name, _, form in _FIGURES:
        words += [form.format(found[name]) if name in found else "-" for found in (planned, row.measured)]
    return [*words, str(row.status) + (f": {row.reason}" if row.reason else "")]


def result_csv(rows: Sequence[Row]) -> str:
    """Returns the results of a benchmark as CSV.

    Args:
        rows: the results.
    """
    stream = io.StringIO()
    table = csv.writer(stream, lineterminator="\n")
    figures = [name for name, _, _ in _FIGURES]
    table.writerow(
        ["cell", "strategy", "devices", *(f"{one}_{name}" for name in figures for one in ("planned", "measured"))]
        + ["device", "status", "reason"]
    )
    for row in rows:
        config = row.cell.get("config") or {}
        found = [one.get(name, "") for name in figures for one in (row.planned, row.measured)]
        about = [row.cell["name"], config.get("distributed_strategy", ""), config.get("gpu_count", "")]
        table.writerow([*about, *found, row.measured.get("device", ""), str(row.status), row.reason])
    return stream.getvalue().rstrip("\n")
