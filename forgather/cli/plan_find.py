"""`fgcli plan --find`: the options of the search, its table, and the file that it writes."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from forgather.cli.output import print_note, write_json, write_text
from forgather.config.graph import Scalar
from forgather.errors import PlanError
from forgather.interrupt import status_of
from forgather.launch.finding import Found, Search, find
from forgather.launch.planning import Device, free_on
from forgather.launch.room import room_of
from forgather.launch.written_choice import refuse_writing, write_best
from forgather.planner.choices import POSITIONS
from forgather.planner.foreign_configs import FORMS, missing_settings
from forgather.planner.hardware import Hardware
from forgather.planner.memory_plan import format_size
from forgather.planner.pipeline_choices import LEFT_OUT
from forgather.planner.ranking import ORDERS, Cell, rejection_lines, rejections
from forgather.project.project import Project
from forgather.project.trainer_arguments import trainer_arguments

_SHOWN = 10
_PIPELINES = (
    "pipelines: micro-batches of one row, drawn from traces of stages with three blocks; split_spec has the cuts",
    *(f"  not planned: {one}" for one in LEFT_OUT),
)


def add_find(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the search."""
    parser.add_argument(
        "--find",
        action="store_true",
        help="rank the ways to train this config: strategy, recomputation, offload, micro-batches, pipelines; with "
        "--hardware or --memory",
    )
    parser.add_argument("--by", choices=ORDERS, help="with --find: the order (default: tokens)")
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="ROWS",
        help="with --find: rows of an update over all processes (default: those of the config on these devices)",
    )
    parser.add_argument(
        "--write", metavar="PATH", help="with --find: write the best way as a new config that extends this one"
    )
    parser.add_argument(
        "--write-as",
        choices=("config", *FORMS),
        help="what --write writes: a config, or a file of another tool (default: config)",
    )


def run_find(project: Project, options: argparse.Namespace, *, gpus: int) -> int:
    """Searches, prints the ranking, writes the best way where asked, and returns the exit status.

    Args:
        project: the project, opened with the config.
        options: the options of the command.
        gpus: the number of devices of a machine.

    Raises:
        PlanError: FG992 if nothing fits; FG993 if nothing can be searched for or written.
    """
    others = ("grid", "longest", "tokens", "days")
    if (other := next((name for name in others if getattr(options, name) is not None), None)) is not None:
        raise PlanError(
            f"--{other} cannot be combined with --find",
            code="FG993",
            hint=f"find a way first, --write it as a config, and plan that one with --{other}",
        )
    _refuse_uneven_positions(project, gpus * options.nodes)
    if options.global_batch is not None and options.global_batch < 1:
        raise PlanError(f"--global-batch is {options.global_batch}", code="FG993", hint="give a number above 0")
    cluster = {"gpus": gpus, "nodes": options.nodes}
    search = Search(
        **cluster,
        device=searched_device(room_of(project, **cluster, hardware=options.hardware).device, options),
        by=options.by or ORDERS[0],
        price=options.price,
        rows=options.global_batch,
        say=print_note,
    )
    written_as = options.write_as or "config"
    if options.write is not None:
        refuse_writing(project, options.write, written_as)
    # What constructors print must not be mixed with the result.
    with redirect_stdout(sys.stderr):
        found = find(project, search)
    written = None
    if options.write is not None and found.interruption is None:
        file, cell = write_best(project, found, search, options.write, written_as)
        missing = missing_settings(written_as, cell.settings, cell.rows, cell.micro_batches)
        sizes = {"rows": cell.rows, "micro_batches": cell.micro_batches}
        written = {"file": file, "title": cell.title, **sizes, "missing_settings": missing}
    if options.json:
        write_json({"config": project.config_name, **found.as_data(), "written": written}, options.output)
    else:
        write_text("\n".join(_lines(found, search, written)), options.output)
    if found.interruption is None:
        return 0
    print_note("interrupted: the ranking is that of the ways that were planned until then; nothing was written")
    return status_of(found.interruption)


def _refuse_uneven_positions(project: Project, processes: int) -> None:
    # Each way that is searched divides the positions of a row as the config does.
    arguments = trainer_arguments(project.graph)
    node = None if arguments is None else arguments.get(POSITIONS)
    size = node.value if isinstance(node, Scalar) else node
    if size is None or (isinstance(size, int) and (size < 1 or processes % size == 0)):
        return
    found = f"is {size}, and {processes} devices cannot be divided by it" if isinstance(size, int) else "is computed"
    raise PlanError(
        f"{POSITIONS} {found}",
        code="FG993",
        hint=f"search on other devices, or without it: --set trainer_args.{POSITIONS}=1",
    )


def refuse_without_find(options: argparse.Namespace) -> None:
    """Raises an error for options that belong to a search.

    Raises:
        PlanError: FG993 with the first of them.
    """
    for name in ("write", "write_as", "global_batch", "by"):
        if getattr(options, name) is not None:
            raise PlanError(f"--{name.replace('_', '-')} needs --find", code="FG993", hint="add --find")


def searched_device(device: Device | None, options: argparse.Namespace) -> Device:
    """Returns the device of each process, with the memory of `--memory`, of which `--free` is free.

    Args:
        device: the device with all of its memory; None if it is unknown.
        options: the options of the command.

    Raises:
        PlanError: FG993 if there is no device.
    """
    if (memory := options.memory) is not None:
        title, kind = f"a device of {format_size(memory)}", options.device_type or "cuda"
        given = device or Device(Hardware(name="given", title=title, kind=kind))
        device = Device(replace(given.hardware, memory_bytes=memory), given.held_bytes)
    if (found := free_on(device, options.free, options.device_type)) is None:
        raise PlanError(
            "--find needs a device",
            code="FG993",
            hint="add --hardware, for example --hardware rtx-4090, or --memory 24GB",
        )
    return found


def _lines(found: Found, search: Search, written: dict[str, Any] | None) -> list[str]:
    title = search.device.hardware.title
    devices = f"{search.gpus} x {title}" + (f" on each of {search.nodes} machines" if search.nodes > 1 else "")
    lines = [
        f"{devices}: {found.rows} rows an update, {len(found.cells)} ways to divide them, {len(found.ranking)} may fit",
        "",
        *_table(found.ranking[:_SHOWN]),
    ]
    if any(cell.is_verified for cell in found.ranking):
        lines.append("verified: traced at its own size, with all blocks of the model")
    if any(cell.host_bytes for cell in found.ranking[:_SHOWN]):
        lines.append("host memory: what a machine holds at least of offloaded state; its memory is not known")
    if len(found.ranking) > _SHOWN:
        lines.append(f"and {len(found.ranking) - _SHOWN} more: --json has all")
    usable = {cell.title for cell in found.ranking}
    rejected = rejections(found.cells)
    if rejected:
        lines += ["", "rejected"]
        lines += [f"  {line}" for line in rejection_lines(rejected, usable)]
    has_whole_rows = not any(POSITIONS in cell.settings for cell in found.cells)
    lines += ["", *_PIPELINES] if search.gpus * search.nodes > 1 and has_whole_rows else []
    if written is not None:
        lines += ["", f"written: {written['file']} ({written['title']}, micro-batches of {written['rows']})"]
        if missing := ", ".join(f"{name} {json.dumps(value)}" for name, value in written["missing_settings"].items()):
            lines.append(f"  such a file has no words for {missing}: set that in the code that trains")
    return lines


def _table(cells: tuple[Cell, ...]) -> list[str]:
    heads = ("", "way", "rows x micro-batches", "need of a device", "host memory", "tokens/s", "price of 1B tokens", "")
    rows = [heads]
    for number, cell in enumerate(cells, 1):
        speed, price = cell.tokens_per_second, cell.price
        rows.append(
            (
                str(number),
                cell.title,
                f"{cell.rows} x {cell.micro_batches}",
                f"{format_size(cell.least)} to {format_size(cell.most)}"
                if cell.least < cell.most
                else format_size(cell.most),
                format_size(cell.host_bytes) if cell.host_bytes else "",
                "" if speed is None else f"{speed.low:,.0f} to {speed.high:,.0f}",
                "" if price is None else f"{price.low:,.2f} to {price.high:,.2f}",
                f"{cell.verdict}{', verified' if cell.is_verified else ''}",
            )
        )
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
