"""`fgcli train --dry-run`: what would run, what each process would hold, and whether it fits, as text or as data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from forgather.cli.output import print_note, write_json, write_text
from forgather.cli.slow_note import slow_note
from forgather.errors import ProjectError
from forgather.launch import RunPlan
from forgather.launch.dry_run import dry_run_layout, layout_text
from forgather.launch.plan_check import fit_line
from forgather.launch.planning import fit_on, traced_plan
from forgather.launch.process_request import ProcessRequest
from forgather.launch.room import room_of
from forgather.planner.fit import lacks_memory, surely_fits
from forgather.project.path_display import Display

_ON_ONE_MACHINE = 8  # the usual number of GPUs in one machine


def machines_of(asked: ProcessRequest, world_size: int | None) -> dict[str, Any]:
    """Returns the number of processes on each machine, and of machines, as arguments of a plan.

    Args:
        asked: the processes that the config and the command line ask for.
        world_size: the number of processes of `--world-size`; None without it. If a machine has one process or as many
            as devices, as many on each machine are assumed as divide this number, at most 8.

    Raises:
        ProjectError: FG462 if the number of processes is not known, or if machines with the same number of processes
            do not have that many.
    """
    if world_size is None:
        if asked.world_size is None:
            raise ProjectError(
                f"the number of processes depends on the machine: {_processes(asked)}",
                code="FG462",
                hint="add --world-size with the number of processes to plan",
            )
        return {"gpus": asked.per_node, "nodes": asked.num_nodes}
    if world_size < 1:
        raise ProjectError(f"--world-size is {world_size}", code="FG462", hint="give a number of processes")
    if isinstance(asked.per_node, str) or asked.per_node == 1:
        gpus = max(number for number in range(1, _ON_ONE_MACHINE + 1) if world_size % number == 0)
        return {"gpus": gpus, "nodes": world_size // gpus}
    gpus = min(asked.per_node, world_size)
    if world_size % gpus:
        raise ProjectError(
            f"--world-size is {world_size}, and each machine has {gpus} processes ({asked.source})",
            code="FG462",
            hint=f"give a multiple of {gpus}, or add --nproc-per-node with a number that divides {world_size}",
        )
    return {"gpus": gpus, "nodes": world_size // gpus}


def dry_run(
    plan: RunPlan,
    asked: ProcessRequest,
    command: list[str],
    options: argparse.Namespace,
    machines: dict[str, Any] | None,
) -> int:
    """Prints a dry run, and returns the exit status: 1 if a process does not fit on its device.

    Args:
        plan: the run.
        asked: the processes that the config and the command line ask for.
        command: the words of the command.
        options: the options of the command.
        machines: what `machines_of` returns; None if nothing is built.
    """
    fit = layout = None
    # What constructors print must not be mixed with the result.
    with redirect_stdout(sys.stderr), slow_note("tracing the model; one of many parameters takes a minute or more"):
        if machines is not None and options.world_size is not None:
            layout = dry_run_layout(plan, **machines)
        if machines is not None and (options.hardware is not None or options.free is not None):
            fit = _fit(plan, options, machines)
    if options.json:
        write_json({**(layout or _facts(plan, asked, command)), "fit": fit})
    else:
        text = _text(plan, asked) if layout is None else layout_text(layout)
        write_text(text if fit is None else f"{text}\n\n{_fit_text(fit, options)}")
    return int(lacks_memory(fit))


def _fit(plan: RunPlan, options: argparse.Namespace, machines: dict[str, Any]) -> dict[str, Any] | None:
    room = room_of(plan.project, **machines, hardware=options.hardware, free=options.free)
    if room.device is None:
        print_note("hardware of meta names several devices, and a run is compared with one: add --hardware")
        return None
    found, _ = traced_plan(plan.project, **room.cluster)
    return {**fit_on(found, room.device), **machines}


def _fit_text(fit: Mapping[str, Any], options: argparse.Namespace) -> str:
    gpus, nodes = fit["gpus"], fit["nodes"]
    processes = "1 process" if gpus * nodes == 1 else f"{gpus * nodes} processes"
    same = " and ".join(f"--{name}" for name in ("hardware", "free") if vars(options)[name] is not None)
    way = f"; 'fgcli plan --gpus {gpus} --nodes {nodes}' with the same {same} plans ways out"
    return f"{fit_line(fit)} ({processes})" + ("" if surely_fits(fit) else way)


def _facts(plan: RunPlan, asked: ProcessRequest, command: list[str]) -> dict[str, Any]:
    project = plan.project
    return {
        "project": project.meta.name,
        "config": project.config_name,
        "main": plan.constructor,
        "targets": list(project.targets),
        "output_dir": plan.output_dir,
        "run_dir": plan.run_dir,
        "variables": dict(project.variables),
        "overrides": [{"path": path, "value": text} for path, text in project.overrides],
        "nproc_per_node": asked.per_node,
        "nnodes": asked.num_nodes,
        "command": command,
    }


def _text(plan: RunPlan, asked: ProcessRequest) -> str:
    project = plan.project
    display = Display(project.meta.project_dir, project.meta.workspace_root)
    changes = [f"{name}={value!r}" for name, value in project.variables.items()]
    changes += [f"{path}={text}" for path, text in project.overrides]
    rows = {
        "project": f"{project.meta.name}  ({display(project.meta.project_dir)})",
        "config": ", ".join(project.lineage).removeprefix("config "),
        "main": plan.constructor,
        "targets": ", ".join(project.targets),
        "run folder": display(plan.run_dir),
        "changes": ", ".join(changes) or "none",
    }
    if not asked.is_one:
        rows["processes"] = _processes(asked)
    return "\n".join(f"{label:<10}  {value}" for label, value in rows.items())


def _processes(asked: ProcessRequest) -> str:
    here = {"gpu": "one for each GPU", "auto": "one for each GPU, else one for each CPU"}.get(str(asked.per_node))
    each = "" if asked.num_nodes == 1 else f" on each of {asked.num_nodes} machines, this is machine {asked.node_rank}"
    return f"{here or asked.per_node}{each}  ({asked.source})"
