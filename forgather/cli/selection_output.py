"""A selection of hardware and strategy, and the cells of a benchmark, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        f"memory     {memory['per_gpu_gb']:.1f} GB on each GPU at the peak, by formula"
        + (f"; {memory['host_gb']:.1f} GB of the host for each" if memory["host_gb"] else ""),
    ]
    lines += [f"  {name:<14}{memory[f'{name}_gb']:>7.2f} GB" for name in _ROWS]
    lines += [f"note: {note}" for note in found["assumed"]]
    return lines + [f"note: {reason}" for reason in found["unsuitable"].values()]


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{ending * (count != 1)}"


def benchmark_lines(cells: list[Mapping[str, Any]]) -> list[str]:
    """Returns the cells of a benchmark as lines of a table.

    Args:
        cells: the cells, as `forgather.planner.benchmark` makes them.
    """
    header = ("cell", "rows", "planned GB", "strategy")
    table = [header, *(_benchmark_row(cell) for cell in cells)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _benchmark_row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    config = cell.get("config")
    if config is None:
        return cell["name"], "", "", f"not planned: {cell['reason']}"
    planned = f"{config['estimated_memory']['per_gpu_gb']:.2f}"
    return cell["name"], str(config["global_batch_size"]), planned, config["summary"]
