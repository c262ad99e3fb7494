"""`fgcli rerun`: repeats a past run from the record in the run folder. Runs the code that the config names."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import plural, print_error, print_findings, print_note, write_json, write_text
from forgather.cli.trusting import ask_trust
from forgather.errors import ProjectError
from forgather.interventions import Intervention, read_interventions, repeating
from forgather.launch import Outcome, plan_run, prepare_run
from forgather.launch import run as run_plan
from forgather.launch.multi_process import CHECKED, run_joined, start_processes
from forgather.launch.process_request import ProcessRequest
from forgather.launcher_env import is_worker
from forgather.project.output_lock import output_folder_lock
from forgather.project.path_display import near_path
from forgather.project.provenance import Row, Status, verify
from forgather.project.rerun import (
    Losses,
    compare_losses,
    complete_record,
    new_output_dir,
    rerun_meta,
    rerun_project,
    unchanged_record,
)
from forgather.project.run_reader import PastRun, open_run
from forgather.project.run_writer import new_folder, run_folder_name
from forgather.run_control import Action

EXECUTES = True
TRAINS = True
DESCRIPTION = """Repeat a past run from the record in its folder. First, everything that the run depends on is verified
(record, code, templates, versions, data, environment), and what cannot be restored is listed. Then the same graph is
trained in as many processes as before, in another output folder; what 'fgcli control' changed in the first run is
changed after the same steps. At the end, the loss files of both runs are compared byte by byte; the exit status is 1 if
they differ."""
EXAMPLES = """examples:
  fgcli rerun output_models/tiny_llama/runs/20260101T120000Z-tiny --dry-run      only verify
  fgcli rerun output_models/tiny_llama/runs/20260101T120000Z-tiny
  fgcli rerun RUN --output-dir /tmp/again --anyway"""

_THINGS = {
    "record": ("file of the record", "files of the record"),
    "code": ("Python file", "Python files"),
    "template": ("template", "templates"),
    "version": ("version of a package", "versions of packages"),
    "git": ("Git commit", "Git commits"),
    "data": ("source of data", "sources of data"),
    "environment": ("environment variable", "environment variables"),
    "processors": ("fact about the processors", "facts about the processors"),
    "checkpoint": ("checkpoint", "checkpoints"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")
    parser.add_argument("--output-dir", metavar="DIR", help="output folder (default: 'reruns/TIME' in that of the run)")
    parser.add_argument("--dry-run", action="store_true", help="verify, print, and construct nothing")
    parser.add_argument("--anyway", action="store_true", help="run although something cannot be restored")
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: verifies the record and repeats the run.

    Returns the exit status of the run, or 1 if the run ended with 0 and the losses differ.
    """
    options = invocation.options
    past = open_run(options.run_folder)
    if is_worker(os.environ) and not options.dry_run:
        return run_joined(partial(_run_joined, invocation, past))
    print_findings(past.notes, past.project_dir)
    changes = read_interventions(past.folder)
    output_dir = new_output_dir(past, options.output_dir, datetime.now(UTC))
    rows = verify(past, rerun_meta(past))
    lost = [row for row in rows if row.fate is Status.LOST]
    if not options.dry_run and (options.anyway or not lost):
        ask_trust(rerun_project(past, rerun_meta(past), output_dir))
        output_dir = new_folder(output_dir) if options.output_dir is None else output_dir
    if not options.json:
        lines = [*_table(rows), _counts(rows), *_changes(changes), f"output folder: {near_path(output_dir)}"]
        _print(lines, to_errors=not options.dry_run)
    if options.dry_run:
        if options.json:
            write_json({**_verified(past, output_dir, rows), "can_be_restored": not lost})
        return int(bool(lost))
    if lost and not options.anyway:
        things = f"{plural(len(lost), 'thing')} that the run depends on"
        first = ", ".join(f"{row.what} {row.name}" for row in lost[:3])
        raise ProjectError(
            f"{things} cannot be restored: {first}",
            code="FG439",
            hint="bring it back, or run with --anyway: that is then another run",
        )
    if past.processes > 1:
        return _started(invocation, past, output_dir)
    return _repeated(invocation, past, output_dir, rows)


def _started(invocation: Invocation, past: PastRun, output_dir: str) -> int:
    """Repeats the run with as many processes as the first run, all of them on this machine."""
    print_note(f"processes   {past.processes}, as in the first run")
    # By this variable, messages of the processes name fgcli and not torchrun as the program that started them.
    os.environ[CHECKED] = "1"
    asked = ProcessRequest(per_node=past.processes, source="the first run")
    ending = start_processes(asked, [*invocation.arguments, "--output-dir", output_dir])
    if ending.error is not None:
        print_error(ending.error, past.project_dir)
    return ending.status


def _run_joined(invocation: Invocation, past: PastRun, member: Any) -> int:
    """Repeats the run in the current process, which is one of several; only rank 0 writes and prints."""
    given = invocation.options.output_dir
    output_dir = member.share("output", {"dir": new_output_dir(past, given, datetime.now(UTC))})["dir"]
    if member.is_main:
        rows = verify(past, rerun_meta(past)) if invocation.options.json else ()
        return _repeated(invocation, past, output_dir, rows, member)
    plan = plan_run(rerun_project(past, rerun_meta(past), output_dir))
    run_dir = member.share("run")["run_dir"]
    member.begin_construction(run_dir)
    with redirect_stdout(sys.stderr), unchanged_record(past, plan.project.meta), repeating(past.folder):
        return run_plan(plan, run_dir, built=lambda _: member.begin_run()).status


def _repeated(invocation: Invocation, past: PastRun, output_dir: str, rows: Sequence[Row], member: Any = None) -> int:
    """Repeats the run in the current process, and prints whether the losses of both runs are equal.

    Args:
        invocation: the parsed command line.
        past: the run to repeat.
        output_dir: the output folder of the repeated run.
        rows: the results of the verification, for JSON.
        member: the current process as a `Peer` of several processes, or None if there is only one process.

    Returns:
        The exit status of the repeated run, or 1 if that is 0 and the losses differ.
    """
    plan = plan_run(rerun_project(past, rerun_meta(past), output_dir))
    plan = replace(plan, output_dir=output_dir, run_dir=run_folder_name(output_dir, past.config, plan.started))
    as_json = invocation.options.json
    stdout = redirect_stdout(sys.stderr) if as_json else nullcontext()
    with output_folder_lock(output_dir), stdout, unchanged_record(past, plan.project.meta):
        run_dir = prepare_run(plan, ["fgcli", *invocation.arguments])
        # The copy of the first run's sources replaces those that were just recorded: the files may have changed since.
        complete_record(run_dir, past, plan.project)
        print_note(f"first run   {shlex.quote(near_path(past.folder))}")
        if member is not None:
            member.share("run", {"run_dir": run_dir})
            member.begin_construction(run_dir)

        def built(_: object) -> None:
            print_note(f"run folder  {shlex.quote(near_path(run_dir))}")
            if member is not None:
                member.begin_run()

        with repeating(past.folder):
            outcome = run_plan(plan, run_dir, built=built)
    losses = compare_losses(past.folder, outcome.run_dir)
    if as_json:
        write_json({**_verified(past, output_dir, rows), **_ending(outcome, losses)})
    else:
        print_note(_verdict(losses))
    # The first run was stopped by 'fgcli control', and so was this one: that is how a repeated run ends well.
    is_stopped = outcome.interrupted and any(one.action is Action.STOP for one in read_interventions(past.folder))
    return int(losses.differ) if is_stopped and losses.same else outcome.status or int(losses.differ)


def _changes(changes: Sequence[Intervention]) -> list[str]:
    """Returns the lines about what 'fgcli control' changed in the first run."""
    return [
        f"step {one.step}: stop, as in the first run"
        if one.action is Action.STOP
        else f"step {one.step}: set {one.name}={one.value:g}, as in the first run"
        for one in changes
    ]


def _verified(past: PastRun, output_dir: str, rows: Sequence[Row]) -> dict[str, object]:
    return {"run": past.folder, "output_dir": output_dir, "rows": [_fact(row) for row in rows]}


def _print(lines: Sequence[str], *, to_errors: bool) -> None:
    if not to_errors:
        write_text("\n".join(lines))
        return
    for line in lines:
        print_note(line)


def _table(rows: Sequence[Row]) -> list[str]:
    shown = [row for row in rows if row.fate is not Status.SAME]
    if not shown:
        return []
    cells = [(str(row.fate), row.what, row.name, row.then, row.now) for row in shown]
    heads = [("", "what", "name", "then", "now"), *cells]
    widths = [min(max(len(line[column]) for line in heads), 48) for column in range(4)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, [*widths, 0], strict=True)) for line in heads]
    return [line.rstrip() for line in lines]


def _counts(rows: Sequence[Row]) -> str:
    same = Counter(row.what for row in rows if row.fate is Status.SAME)
    parts = [plural(count, *_THINGS.get(what, (what, f"{what}s"))) for what, count in same.items()]
    if not parts:
        return "nothing is known to be unchanged"
    return f"unchanged: {', '.join(parts)}"


def _fact(row: Row) -> dict[str, str]:
    return {"fate": str(row.fate), "what": row.what, "name": row.name, "then": row.then, "now": row.now}


def _ending(outcome: Outcome, losses: Losses) -> dict[str, object]:
    return {
        "status": outcome.status,
        "interrupted": outcome.interrupted,
        "run_dir": outcome.existing_run_dir,
        "model_dir": outcome.model_dir,
        "same_loss": losses.same,
        "loss_lines": losses.lines,
        "first_difference": losses.first,
        "differs": losses.differ,
    }


def _verdict(losses: Losses) -> str:
    if losses.lines is None:
        return "loss file   the first run kept none: nothing to compare"
    if losses.same:
        return f"loss file   identical bytes, {plural(losses.lines, 'line')}"
    if losses.first is None:
        other = "more" if losses.continues else "fewer"
        first = plural(losses.lines, "line")
        return f"loss file   identical up to the end of the shorter file; the first run wrote {first}, this one {other}"
    return f"loss file   differs from line {losses.first} of {losses.lines} on"
