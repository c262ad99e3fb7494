"""`fgcli train`: runs the target `main` of a config. Runs what the config names."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext, redirect_stdout

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_set
from forgather.cli.output import near_path, print_findings, print_note, write_json, write_text
from forgather.launch import Outcome, RunPlan, plan_run, prepare_run
from forgather.launch import run as run_plan
from forgather.project.display import Display

CONFIG_OPTIONS = True
EXECUTES = True
DESCRIPTION = """Run the target 'main' of a config: train a trainer, or call a callable. The exit status is that of
the run. What repeats the run (config, templates, overrides, versions, git state) is kept in the run's folder."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml train
  fgcli -t tiny.yaml train --dry-run
  fgcli -t tiny.yaml train --set trainer_args.max_steps=10 --set optimizer.lr=3e-4"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and construct nothing")
    add_set(parser)
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs `main` and returns the exit status of the run."""
    project = invocation.open_project()
    plan = plan_run(project)
    print_findings(project.diagnostics, project.meta.project_dir)
    command = ["fgcli", *invocation.arguments]
    if invocation.options.dry_run:
        _print_plan(plan, command, as_json=invocation.options.json)
        return 0
    run_dir = prepare_run(plan, command)
    print_note(f"run folder {near_path(run_dir)}")
    with redirect_stdout(sys.stderr) if invocation.options.json else nullcontext():
        outcome = run_plan(plan, run_dir)
    _print_outcome(outcome, as_json=invocation.options.json)
    return outcome.status


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
    if as_json:
        write_json(
            {
                "status": outcome.status,
                "interrupted": outcome.interrupted,
                "run_dir": outcome.run_dir,
                "model_dir": outcome.model_dir,
                "checkpoint": outcome.checkpoint,
            }
        )
        return
    if outcome.interrupted:
        saved = outcome.checkpoint and f"the state is saved in {near_path(outcome.checkpoint)}"
        print_note(f"interrupted; {saved or 'nothing was saved'}")
    if outcome.model_dir and not _names_the_model(outcome.run_dir):
        print_note(f"model      {near_path(outcome.model_dir)}")


def _names_the_model(run_dir: str) -> bool:
    """Whether a callback has ended the run with its own list of places, and the model is in it."""
    try:
        with open(os.path.join(run_dir, "summary.json"), encoding="utf-8") as stream:
            return "model" in json.load(stream)["places"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
