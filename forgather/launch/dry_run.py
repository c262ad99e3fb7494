"""The dry run: the parameters and memory of each process of a run, computed in the current process.

The inputs are a `RunPlan` and a number of processes. The output is plain data, whose form `forgather/ml/dry_run.py`
describes, and a table of these data. Nothing is written and no process is started.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from forgather.errors import ProjectError
from forgather.launch.in_process import MAIN, RunPlan
from forgather.launch.process_request import ProcessRequest

_DRY_RUN = "forgather.ml.dry_run:dry_run"
_ON_ONE_MACHINE = 8  # the usual number of GPUs in one machine
_HEAD = ["ranks", "stage", "parameters", "memory", "holds"]


def dry_run_layout(plan: RunPlan, world_size: int, asked: ProcessRequest) -> dict[str, Any]:
    """Returns the modules, parameters and memory of each process, and the tensor shapes of one micro-batch.

    Args:
        plan: the run.
        world_size: the number of processes.
        asked: the processes that the config and the command line ask for. The number of processes on one machine is
            used if it is above 1. If it is 1 or depends on the devices, 8 processes on each machine are assumed.

    Raises:
        ProjectError: FG462 if `world_size` is below 1.
        Exception: if the construction of the config's objects fails; the exception is raised unchanged.
    """
    if world_size < 1:
        raise ProjectError(f"--world-size is {world_size}", code="FG462", hint="give a number of processes")
    per_node = asked.per_node if isinstance(asked.per_node, int) and asked.per_node > 1 else _ON_ONE_MACHINE
    # Modules outside `forgather.ml` reach it only by name, so that commands without training never load torch.
    module, name = _DRY_RUN.split(":")
    dry_run = getattr(import_module(module), name)
    with plan.project.located():
        found: dict[str, Any] = dry_run(
            lambda hook: plan.project.build_with(hook, MAIN), world_size=world_size, local_world_size=per_node
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
    lines = [f"{label:<10}  {value}" for label, value in rows]
    lines += [
        "",
        *_table(_HEAD, [_holding(h) for h in found["holdings"]]),
    ]
    lines += ["", "one micro-batch of one replica"]
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
