"""`fgcli new`: writes a new project or config that can be trained without changes."""

from __future__ import annotations

import argparse
import os
import shlex
from contextlib import suppress

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import write_json, write_text
from forgather.errors import ProjectError
from forgather.project.metadata_cache import load_meta
from forgather.project.scaffold import DEFAULT_PARENT, new_config, new_project
from forgather.project.trust import Trust, add_trust
from forgather.project.workspace import find_project

DESCRIPTION = "Make a working project in a new folder, or a config in a project. Overwrites nothing."
EXAMPLES = """examples:
  fgcli new project my_project
  fgcli -p my_project new config small
  fgcli -p my_project new config on_hf --extends trainers/hf_trainer.yaml"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("what", choices=("project", "config"), help="what to make")
    parser.add_argument("name", metavar="NAME", help="folder of the project, or name of the config")
    parser.add_argument("--extends", metavar="TEMPLATE", help=f"parent of the config (default: {DEFAULT_PARENT})")
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: writes the files, and returns the exit status."""
    options = invocation.options
    if options.what == "project":
        files = new_project(options.name)
        _trust(options.name)
        next_step = f"cd {shlex.quote(options.name)} && fgcli train"
    else:
        meta = load_meta(find_project(invocation.project_dir))
        files = [new_config(meta, options.name, options.extends or DEFAULT_PARENT)]
        where = f"-p {shlex.quote(invocation.project_dir)} " if invocation.project_dir else ""
        next_step = f"fgcli {where}-t {shlex.quote(options.name)} train"
    if options.json:
        write_json({"files": [os.path.abspath(file) for file in files], "next": next_step})
    else:
        write_text("\n".join([*(f"made {os.path.relpath(file)}" for file in files), f"now: {next_step}"]))
    return 0


def _trust(folder: str) -> None:
    """Stores that the code of a new project is trusted. If that fails, the user is asked before the first run."""
    with suppress(ProjectError):
        add_trust(Trust(folders=(os.path.realpath(folder),)))
