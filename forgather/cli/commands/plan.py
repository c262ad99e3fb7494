"""`fgcli plan`: what a run needs on each device, before it runs. Builds the run without weights."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from forgather.cli.auto_start import room_words, with_auto_values
from forgather.cli.calibrating import calibrate
from forgather.cli.invocation import Invocation
from forgather.cli.options import OWN_NAMES, add_json, add_output, add_set, memory_size
from forgather.cli.output import print_findings, print_note, write_json, write_text
from forgather.cli.plan_find import add_find, refuse_without_find, run_find
from forgather.cli.plan_grid import add_grid, grid_lines, longest_lines
from forgather.cli.plan_output import fit_lines, plan_lines, row_lines
from forgather.cli.plan_start import plan_words
from forgather.cli.plan_time_output import device_count_lines, time_lines
from forgather.cli.slow_note import slow_note
from forgather.cli.trusting import ask_trust
from forgather.errors import ForgatherError
from forgather.launch.auto_values import AutoValue
from forgather.launch.in_process import MAIN, plan_run
from forgather.launch.planning import device_of, fit_on, page_of, rows_within, traced_plan
from forgather.launch.room import Room, room_of
from forgather.launch.sequences import Cluster, grid_of, longest_of, refuse_without_limit, row_length
from forgather.launch.time_planning import device_count_of, time_of
from forgather.launch.ways_out import Place, ways_out
from forgather.planner.fit import lacks_memory, surely_fits
from forgather.planner.run_time import check_amounts, check_device
from forgather.planner.work import RunWork
from forgather.project.project import Project
from forgather.project.world_size import processes_per_machine

CONFIG_OPTIONS = True
EXECUTES = True
DESCRIPTION = """Plan the memory and the time of a run. The run is built with tensors that have shapes and no values,
and its own strategy computes a step and an evaluation: no GPU, no weights and no other process are needed. A row
is 'traced' if the code of the run allocated it, 'formula' if it follows from settings, and 'assumed' otherwise. With
--hardware, or with a GPU here, the plan says whether each process fits, and how long a step and the run take, as ranges
with what is assumed. If a process does not fit, changes of the config are planned until three of them fit: the ways
out. --tokens and --days ask how many devices a deadline needs. -o plan.html writes a page with bars of the memory of
each process, its course over a step, and the time by kind. --calibrate learns from finished runs how much of its rates
a device reaches, for later plans. --find plans all ways to train the config on the devices, ranks those that fit, and
says why others do not. --grid plans other lengths of rows and numbers of rows, and --longest finds the longest rows
that fit. The config is checked first, as by 'fgcli check'; one with errors is not planned. The exit status is 1 if a
process does not fit on its device, if nothing that was asked for fits (a way, a batch, a length), and after an error;
it is 0 if a process may fit."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml plan
  fgcli -t fsdp2.yaml plan --hardware h200 --gpus 8 --nodes 4
  fgcli -t fsdp2.yaml plan --hardware h200 --gpus 8 --tokens 300e9 --price 3.5
  fgcli -t fsdp2.yaml plan --hardware h200 --gpus 8 --tokens 1e12 --days 14
  fgcli -t tiny.yaml plan --set trainer_args.per_device_train_batch_size=64
  fgcli -t tiny.yaml plan --memory 22GB
  fgcli plan --calibrate output_models/a/runs/RUN output_models/b/runs/RUN -o ours.json
  fgcli -t tiny.yaml plan --hardware ours.json
  fgcli -t tiny.yaml plan --free 9.5GiB
  fgcli -t tiny.yaml plan --hardware l4 --grid 2048,4096,8192x1,2,4
  fgcli -t tiny.yaml plan --hardware l4 --longest
  fgcli -t tiny.yaml plan --json
  fgcli -t tiny.yaml plan --find --hardware l4 --gpus 4 --write four_gpus
  fgcli -t tiny.yaml plan --hardware h200 -o plan.html"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="devices of each machine (default: the processes of the config)"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="device of each process: a name of docs/reference/hardware.md, or a file (default: hardware of meta, or "
        "the GPUs here)",
    )
    parser.add_argument(
        "--device-type",
        choices=("cpu", "cuda"),
        help="kind of device where none is named or found (default: cuda with --memory, else cpu)",
    )
    parser.add_argument(
        "--tokens", type=float, metavar="N", help="tokens to train on, as 300e9 (default: the steps of the config)"
    )
    parser.add_argument("--days", type=float, metavar="D", help="with --tokens: how many devices finish in D days")
    parser.add_argument("--price", type=float, metavar="P", help="price of one device for an hour")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=memory_size,
        help="find the largest per_device_train_batch_size that needs at most SIZE, as 22GB or 20.5GiB",
    )
    parser.add_argument(
        "--free",
        metavar="SIZE",
        type=memory_size,
        help="memory that is free on each device (default: all of it; of the GPUs here, what nobody holds)",
    )
    parser.add_argument(
        "--no-ways-out", action="store_true", help="do not plan changes of the config if a process does not fit"
    )
    parser.add_argument(
        "--calibrate",
        nargs="+",
        metavar="RUN",
        help="fit efficiencies to the measured steps of these run folders, and write a file for --hardware "
        "(-o FILE, default: calibrated.json)",
    )
    parser.add_argument("--no-check", action="store_true", help="plan without checking the config first")
    add_grid(parser)
    add_find(parser)
    add_set(parser)
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: plans the run, prints the plan, and returns the exit status."""
    options = invocation.options
    if options.calibrate:
        return calibrate(invocation)
    amounts = {"tokens": options.tokens, "days": options.days, "price": options.price}
    check_amounts(**amounts)
    if options.hardware is not None:
        device_of(options.hardware, gpus=1)  # an unknown name is refused before anything is read
    project = invocation.open_project()
    if not options.no_check:
        from forgather.project.check import check_project

        project.refuse(check_project(project, for_run=True, reserved=OWN_NAMES).findings)
    plan_run(project)
    print_findings(project.diagnostics, project.meta.project_dir)
    ask_trust(project, [MAIN])
    asked = processes_per_machine(project.graph)
    gpus = options.gpus if options.gpus is not None else asked if isinstance(asked, int) else 1
    room = _room(project, options, gpus)
    check_device(amounts, None if room.device is None else room.device.hardware)
    if options.find:
        return run_find(project, options, gpus=gpus)
    refuse_without_find(options)
    length = row_length(project) if options.grid is not None or options.longest is not None else None
    device, cluster = room.device, room.cluster
    if options.longest is not None:
        refuse_without_limit(device, options.memory)
    values = with_auto_values(project, invocation, gpus=gpus, nodes=options.nodes)
    # What constructors print must not be mixed with the result.
    fit = time = count = grid = longest = None
    with redirect_stdout(sys.stderr):
        found, work = _traced(project, cluster)
        rows = None if options.memory is None else rows_within(project, **cluster, limit=options.memory)
        if device is not None:
            fit = fit_on(found, device)
        # Of a device of which only the memory is known, the time is an error only if it was asked for.
        if device is not None and (device.hardware.gives_times or any(amounts.values())):
            time = time_of(work, device.hardware, tokens=options.tokens, price=options.price)
            if options.days is not None:
                deadline = {"tokens": options.tokens, "days": options.days}
                count = device_count_of(project, found, work, device, **deadline)
        if fit is not None and device is not None and not options.no_ways_out and not surely_fits(fit):
            fit["ways_out"] = ways_out(project, found, Place(device=device, **cluster), say=print_note)
            fit["search"] = _search(invocation, cluster)
        others = Cluster(**cluster, device=device, limit=options.memory)
        if length is not None and options.grid is not None:
            grid = grid_of(project, found, length, options.grid, others)
        if length is not None and options.longest is not None:
            longest = longest_of(project, found, length, options.longest, others)
    sizes = {"grid": grid, "longest": longest, "largest_batch": rows}
    result = {"config": project.config_name, **found, "fit": fit, "time": time, "devices": count, **sizes}
    _write(options, result, values)
    nothing = any(answer is not None and answer["size"] == 0 for answer in (rows, longest))
    return int(nothing or lacks_memory(fit))


def _traced(project: Project, cluster: Mapping[str, Any]) -> tuple[dict[str, Any], RunWork]:
    try:
        with slow_note("tracing the model; one of many parameters takes a minute or more"):
            return traced_plan(project, **cluster)
    except ForgatherError as error:
        if error.code == "FG703":
            error.hint = f"{error.hint}; --find plans every trainer that the config may have"
        raise


def _room(project: Project, options: argparse.Namespace, gpus: int) -> Room:
    """Returns what is known about the devices, and notes devices of `meta` with which no plan is compared."""
    room = room_of(project, gpus=gpus, nodes=options.nodes, **room_words(options))
    if room.devices and room.device is None:
        names = ", ".join(dict.fromkeys(one.hardware.name for one in room.devices))
        print_note(f"hardware of meta names several devices ({names}), and a plan is compared with one: add --hardware")
    return room


def _search(invocation: Invocation, cluster: Mapping[str, Any]) -> str:
    """Returns the command that searches all ways to train the config on the devices that were planned."""
    options = invocation.options
    words = plan_words(invocation.arguments, configure, **cluster, hardware=options.hardware)
    free = [] if options.free is None else ["--free", f"{options.free // 1024}KiB"]
    return shlex.join(["fgcli", *words, *free, "--find"])


def _write(options: argparse.Namespace, result: Mapping[str, Any], values: Sequence[AutoValue]) -> None:
    """Writes a plan as `--json` and `-o` say."""
    if options.json:
        auto = {value.name: {"value": value.text, "reason": value.reason} for value in values}
        write_json({**result, "auto": auto}, options.output)
    elif options.output and options.output.endswith(".html"):
        write_text(page_of(result), options.output)
    else:
        lines = [*(value.line() for value in values), *plan_lines(result)]
        lines += [*fit_lines(result["fit"], result["world_size"]), *row_lines(result["largest_batch"])]
        lines += time_lines(result["time"], result["world_size"])
        lines += device_count_lines(result["devices"], options.days)
        lines += [*grid_lines(result["grid"]), *longest_lines(result["longest"])]
        write_text("\n".join(lines), options.output)
