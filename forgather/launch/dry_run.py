"""The dry run: the parameters and memory of each process of a run, computed in the current process.

The inputs are a `RunPlan` and a number of processes. The output is plain data, whose form `forgather/ml/dry_run.py`
describes, and a table of these data. Nothing is written and no process is started.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from forgather.launch.in_process import MAIN, RunPlan

_DRY_RUN = "forgather.ml.dry_run:dry_run"
_HEAD = ["ranks", "stage", "parameters", "size", "holds"]


def dry_run_layout(plan: RunPlan, *, gpus: int, nodes: int) -> dict[str, Any]:
    """Returns the modules, parameters and memory of each process, and the tensor shapes of one micro-batch.

    Args:
        plan: the run.
        gpus: the number of processes on each machine.
        nodes: the number of machines.

    Raises:
        Exception: if the construction of the config's objects fails; the exception is raised unchanged.
    """
    # Modules outside `forgather.ml` reach it only by name, so that commands without training never load torch.
    module, name = _DRY_RUN.split(":")
    dry_run = getattr(import_module(module), name)
    with plan.project.located():
        found: dict[str, Any] = dry_run(
            lambda hook: plan.project.build_with(hook, MAIN), world_size=gpus * nodes, local_world_size=gpus
        )
    return found


def layout_text(found: dict[str, Any]) -> str:
    """Returns the result of `dry_run_layout` as text with a table, for the terminal."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1) or "one process"
    rows = [
        ("processes", f"{found['world_size']}: {mesh}  ({found['strategy']})"),
        ("model", f"{_count(found['parameters'])} parameters"),
        ("update", f"{found['rows_per_update']} row{'' if found['rows_per_update'] == 1 else 's'}"),
    ]
    if found["initial_weights"]:
        rows.append(("weights", found["initial_weights"]))
    lines = [f"{label:<10}  {value}" for label, value in rows]
    lines += [
        "",
        *_table(_HEAD, [_holding(h) for h in found["holdings"]]),
    ]
    lines += ["", "one micro-batch of one replica, in one process without autocast and with all logits"]
    width = max((len(name) for name in found["step"]), default=0)
    lines += [f"  {name:<{width}}  {shape}" for name, shape in found["step"].items()]
    if found["step_problem"]:
        lines.append(f"  {found['step_problem']}")
    return "\n".join(lines)


def _holding(holding: dict[str, Any]) -> list[str]:
    first, last = holding["ranks"]
    part = "" if holding["parameters"] == holding["of"] else f" of {_count(holding['of'])}"
    return [
        str(first) if first == last else f"{first}-{last}",
        ",".join(map(str, holding["stages"])) or "-",
        _count(holding["parameters"]) + part,
        _size(holding["parameter_bytes"]),
        ", ".join(holding["modules"]),
    ]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]


def _count(number: float) -> str:
    for unit, least in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= least:
            return f"{number / least:.3g}{unit}"
    return str(int(number))


def _size(num_bytes: float) -> str:
    for unit, least in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= least:
            return f"{num_bytes / least:.3g} {unit}"
    return f"{int(num_bytes)} B"
