"""`fgcli new`: writes a new project or config that can be trained without changes."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, column_names
from forgather.cli.output import write_json, write_text
from forgather.errors import ProjectError
from forgather.project.metadata_cache import load_meta
from forgather.project.scaffold import DEFAULT_PARENT, new_config, new_project, title_of
from forgather.project.starters import KINDS, Starter
from forgather.project.trust import Trust, add_trust
from forgather.project.workspace import find_project

DESCRIPTION = "Make a working project in a new folder, or a config in a project. Overwrites nothing."
EXAMPLES = """examples:
  fgcli new project my_project
  fgcli new project my_chat --kind chat                        a small model, on conversations that come with it
  fgcli new project my_chat --kind chat --data chats.jsonl --model ../Qwen3-0.6B
  fgcli new project topics --kind classify --data rows.csv --columns text=review,label=stars
  fgcli new project names --kind tag --data words.jsonl        also: seq2seq, preferences
  fgcli -p my_project new config small
  fgcli -p my_project new config on_hf --extends trainers/hf_trainer.yaml"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("what", choices=("project", "config"), help="what to make")
    parser.add_argument("name", metavar="NAME", help="folder of the project, or name of the config")
    parser.add_argument("--extends", metavar="TEMPLATE", help=f"parent of the config (default: {DEFAULT_PARENT})")
    parser.add_argument(
        "--kind",
        choices=KINDS,
        help="what the project is for: fine-tuning on one kind of rows (for images, see docs/how-to/tasks.md)",
    )
    parser.add_argument("--data", metavar="FILE", help="with --kind: the rows to train on (default: a few of our own)")
    parser.add_argument(
        "--columns",
        metavar="NAME=COLUMN",
        type=column_names,
        help="with --data: the columns that hold text and label, tokens and tags, or source and target, as in "
        "text=review,label=stars (default: found by usual names)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="with --kind: folder of the base model, or its name on the Hub (default: a new model)",
    )
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: writes the files, and returns the exit status."""
    options = invocation.options
    _refuse_misplaced(options)
    found = ""
    steps: tuple[str, ...] = ()
    if options.what == "project":
        starter, found = _starter(options) if options.kind else (None, "")
        files = new_project(options.name, starter)
        _trust(options.name)
        next_step = f"cd {shlex.quote(options.name)} && fgcli {'data show' if starter else 'train'}"
        if starter:
            after = starter.use(title_of(options.name))
            steps = ("fgcli check", "fgcli train", "fgcli train --resume  # after a crash", after)
    else:
        meta = load_meta(find_project(invocation.project_dir))
        files = [new_config(meta, options.name, options.extends or DEFAULT_PARENT)]
        where = f"-p {shlex.quote(invocation.project_dir)} " if invocation.project_dir else ""
        next_step = f"fgcli {where}-t {shlex.quote(options.name)} train"
    if options.json:
        facts = {"found": found, "steps": [next_step, *steps]} if steps else {}
        write_json({"files": [os.path.abspath(file) for file in files], "next": next_step, **facts})
    else:
        lines = [f"found {found}"] if found else []
        lines += [f"made {os.path.relpath(file)}" for file in files]
        write_text("\n".join([*lines, f"now: {next_step}", *(f"     {step}" for step in steps)]))
    return 0


def _refuse_misplaced(options: Any) -> None:
    """Raises an error if an option does not belong to what is made.

    Raises:
        ProjectError: FG490.
    """
    given = [name for name in ("kind", "data", "model", "columns") if getattr(options, name) is not None]
    if given and options.what == "config":
        raise ProjectError(f"--{given[0]} is for a new project", code="FG490", hint="fgcli new project NAME --kind ...")
    if given and options.kind is None:
        hint = f"add --kind {', --kind '.join(KINDS[:-1])} or --kind {KINDS[-1]}"
        raise ProjectError(f"--{given[0]} needs to know what the project is for", code="FG490", hint=hint)
    if options.columns and options.data is None:
        raise ProjectError("--columns names columns of --data", code="FG490", hint="add --data FILE")
    if options.what == "project" and options.extends is not None:
        raise ProjectError("--extends is for a new config", code="FG490", hint="fgcli new config NAME --extends ...")


def _starter(options: Any) -> tuple[Starter, str]:
    """Returns what the config says for the data and the model of the options, and what was found in the data.

    Raises:
        ForgatherError: if a row or the model cannot be used.
    """
    data = os.path.abspath(os.path.expanduser(options.data)) if options.data is not None else None
    model = options.model
    if model is not None and os.path.exists(os.path.expanduser(model)):
        model = os.path.abspath(os.path.expanduser(model))
    rows, facts, found = {}, {}, ""
    # Without data and model there is nothing to read; the import takes seconds.
    if data is not None or model is not None or options.kind == "preferences":
        looks = import_module("forgather.ml.data.first_look")
        _refuse_columns(options, looks.COLUMNS.get(options.kind, ()))
        look = looks.first_look(options.kind, options.data and data, model, options.columns)
        rows, facts, found = look.rows, look.facts, look.summary
    return Starter(kind=options.kind, data=data, model=model, rows=rows, facts=facts), found


def _refuse_columns(options: Any, known: Sequence[str]) -> None:
    """Raises FG490 if the rows of the kind have no column of a name that `--columns` has."""
    if unknown := [name for name in options.columns or () if name not in known]:
        hint = f"they have: {', '.join(known)}" if known else "their keys are those of the form of the rows"
        raise ProjectError(f"rows of --kind {options.kind} have no {unknown[0]!r}", code="FG490", hint=hint)


def _trust(folder: str) -> None:
    """Stores that the code of a new project is trusted. If that fails, the user is asked before the first run."""
    with suppress(ProjectError):
        add_trust(Trust(folders=(os.path.realpath(folder),)))
