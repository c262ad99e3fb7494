"""`fgcli train`: runs the target `main` of a config. Runs what the config names."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.options import OWN_NAMES, add_json, add_set
from forgather.cli.output import print_findings, print_note, write_json, write_text
from forgather.errors import Diagnostic
from forgather.launch import Outcome, RunPlan, plan_run, prepare_run
from forgather.launch import run as run_plan
from forgather.project.declared import declared_options
from forgather.project.display import Display, near_path
from forgather.project.output_lock import alone_in
from forgather.project.project import Project

CONFIG_OPTIONS = True
EXECUTES = True
_RESUME = "--resume-from-checkpoint"
DESCRIPTION = """Run the target 'main' of a config: train a trainer, or call a callable. The exit status is that of
the run. What repeats the run (config, templates, overrides, versions, git state) is kept in the run's folder.
The config is checked first, as 'fgcli check' does it; a config with errors is not run."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml train
  fgcli -t tiny.yaml train --dry-run
  fgcli -t tiny.yaml train --set trainer_args.max_steps=10 --set trainer_args.learning_rate=3e-4"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and construct nothing")
    parser.add_argument("--no-check", action="store_true", help="run without looking for mistakes first")
    add_set(parser)
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs `main` and returns the exit status of the run."""
    project = invocation.open_project()
    findings = () if invocation.options.no_check else _checked(project)
    plan = plan_run(project)
    print_findings(findings or project.diagnostics, project.meta.project_dir, invocation.check_command)
    command = ["fgcli", *invocation.arguments]
    if invocation.options.dry_run:
        _print_plan(plan, command, as_json=invocation.options.json)
        return 0
    with alone_in(plan.output_dir), redirect_stdout(sys.stderr) if invocation.options.json else nullcontext():
        run_dir = prepare_run(plan, command)
        print_note(f"run folder {near_path(run_dir)}")
        outcome = run_plan(plan, run_dir)
    _print_outcome(outcome, as_json=invocation.options.json)
    if outcome.interrupted and outcome.checkpoint and not invocation.options.json:
        _print_how_to_go_on(project, command)
    return outcome.status


def _checked(project: Project) -> Sequence[Diagnostic]:
    """Returns what the check found, none of it an error.

    Raises:
        ProjectError: the config has errors; all of them are in it.
    """
    from forgather.project.checking import SAID_BY_THE_RUN, check_project

    findings = check_project(project, for_run=True, reserved=OWN_NAMES).findings
    project.refuse(findings)
    return [found for found in findings if found.code not in SAID_BY_THE_RUN]


def _print_plan(plan: RunPlan, command: list[str], *, as_json: bool) -> None:
    project = plan.project
    display = Display(project.meta.project_dir, project.meta.workspace_root)
    facts = {
        "project": project.meta.name,
        "config": project.config_name,
        "main": plan.constructor,
        "targets": list(project.targets),
        "output_dir": plan.output_dir,
        "run_dir": plan.run_dir,
        "variables": dict(project.variables),
        "overrides": [{"path": path, "value": text} for path, text in project.overrides],
        "command": command,
    }
    if as_json:
        write_json(facts)
        return
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
    write_text("\n".join(f"{label:<10}  {value}" for label, value in rows.items()))


def _print_outcome(outcome: Outcome, *, as_json: bool) -> None:
    ending = _told_ending(outcome.run_dir)
    if as_json:
        write_json(
            {
                "status": outcome.status,
                "interrupted": outcome.interrupted,
                "run_dir": outcome.run_dir,
                "model_dir": outcome.model_dir,
                "checkpoint": outcome.checkpoint,
                "step": ending.get("step"),
                "max_steps": ending.get("max_steps"),
                "metrics": ending.get("final", {}),
            }
        )
        return
    if outcome.interrupted and (ending.get("status") != "interrupted" or "checkpoint" not in ending["places"]):
        saved = outcome.checkpoint and f"the state is saved in {near_path(outcome.checkpoint)}"
        print_note(f"interrupted; {saved or 'nothing was saved'}")
    if outcome.model_dir and "model" not in ending["places"]:
        print_note(f"model      {near_path(outcome.model_dir)}")


def _told_ending(run_dir: str) -> dict[str, Any]:
    """Returns what a callback has told of the end of the run, with its list of places; both empty where none has."""
    nothing: dict[str, Any] = {"places": {}}
    try:
        with open(os.path.join(run_dir, "summary.json"), encoding="utf-8") as stream:
            told = json.load(stream)
    except (OSError, ValueError):
        return nothing
    return told if isinstance(told, dict) and isinstance(told.get("places"), dict) else nothing


def _print_how_to_go_on(project: Project, command: Sequence[str]) -> None:
    """Prints the command that resumes, where the config has an option for it."""
    if any(_RESUME in option.names for option in declared_options(project.graph)):
        print_note(f"to go on:  {shlex.join([*_without_option(command, _RESUME), _RESUME, 'auto'])}")


def _without_option(command: Sequence[str], name: str) -> list[str]:
    kept: list[str] = []
    is_value = False
    for word in command:
        if not (is_value or word == name or word.startswith(f"{name}=")):
            kept.append(word)
        is_value = word == name
    return kept
