"""`fgcli runs import`: makes run folders of the files of W&B and TensorBoard."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from importlib import import_module

from forgather.cli.invocation import Invocation
from forgather.cli.options import a_name
from forgather.cli.output import plural, print_note, write_json, write_text
from forgather.errors import ProjectError
from forgather.project.path_display import near_path
from forgather.runs.foreign_run import DamagedFileError, ForeignRun, Outcome, plausible, write_imported

TOOLS = {"tensorboard": "forgather.runs.tensorboard_files", "wandb": "forgather.runs.wandb_files"}
OUTPUT = "imported"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `runs import` to its parser."""
    parser.add_argument("tool", choices=sorted(TOOLS), metavar="TOOL", help=" or ".join(sorted(TOOLS)))
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", type=a_name, help="file of the tool, or a folder that contains some"
    )
    parser.add_argument(
        "-o", "--output", default=OUTPUT, metavar="FOLDER", help=f"folder for the run folders (default: {OUTPUT})"
    )


def run_import(invocation: Invocation) -> int:
    """Imports the runs of a tool, and returns the exit status: 1 if a file is damaged."""
    options = invocation.options
    done: list[dict[str, object]] = []
    problems: list[str] = []
    for found in _read(options.tool, options.paths, problems):
        folder, outcome = write_imported(found, options.output)
        done.append({"folder": folder, "outcome": str(outcome), "lines": len(found.lines), "left_out": found.left_out})
        if not options.json:
            write_text(_line(found, folder, outcome))
    for problem in problems:
        print_note(problem)
    if options.json:
        write_json({"runs": done, "problems": problems})
    elif done:
        listing = shlex.join(["fgcli", "runs", near_path(options.output)])
        print_note(f"{plural(len(done), 'run')}: '{listing}' lists them")
    return int(bool(problems))


def _line(found: ForeignRun, folder: str, outcome: Outcome) -> str:
    left_out = f", {plural(found.left_out, 'value')} that are no numbers of a step left out" if found.left_out else ""
    return f"{outcome}  {near_path(folder)}  ({plural(len(found.lines), 'line')} of metrics{left_out})"


def _read(tool: str, paths: list[str], problems: list[str]) -> Iterator[ForeignRun]:
    reader = import_module(TOOLS[tool])
    num_read = 0
    for path in paths:
        for name, files in reader.runs_of(path):
            try:
                found = plausible(reader.read_run(name, files, path))
            except (DamagedFileError, OSError) as error:
                problems.append(f"{near_path(name)} is not imported: {getattr(error, 'strerror', None) or error}")
                continue
            num_read += 1
            yield found
    if problems and not num_read:
        first, *rest = problems
        problems.clear()
        others = f" (and {len(rest)} more)" if rest else ""
        raise ProjectError(
            f"{first}{others}", code="FG581", hint="copy the file again from where it was written, or leave it out"
        )
