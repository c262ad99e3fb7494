"""`fgcli eval RUN --lm-eval TASKS`: exports the model, runs lm-evaluation-harness, and prints and stores its result."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path

from forgather.cli.invocation import Invocation
from forgather.cli.output import print_note, write_json, write_text
from forgather.cli.trusting import ask_trust
from forgather.errors import ProjectError
from forgather.launch.evaluation import store_facts
from forgather.launch.export import export, plan_export
from forgather.launch.harness import HarnessResult, find_command, run_harness
from forgather.launch.saved_weights import SavedWeights, find_weights
from forgather.project.path_display import near_path

_OTHERS = ("data", "columns", "out", "generate", "max_new_tokens", "nproc")
_OWN = ("lm_eval_command", "include_path", "apply_chat_template")


def add_harness(parser: argparse.ArgumentParser) -> None:
    """Adds the options of an evaluation by the harness to a parser."""
    group = parser.add_argument_group("lm-evaluation-harness")
    group.add_argument(
        "--lm-eval",
        metavar="TASKS",
        type=_tasks,
        help="evaluate the model on tasks of the harness, separated by commas; --limit N takes the first N rows of "
        "each. The harness reads an export in a temporary folder, which is as large as the model; an adapter is merged "
        "into its base model there, and compared with it, as by 'fgcli export --merge'",
    )
    group.add_argument(
        "--lm-eval-command", metavar="COMMAND", help="the command that starts it (default: lm_eval on the path)"
    )
    group.add_argument("--include-path", metavar="DIR", help="a folder with task files of your own")
    group.add_argument("--apply-chat-template", action="store_true", help="render prompts with the chat template")


def refuse_harness_options(options: argparse.Namespace) -> None:
    """Raises FG968 if an option of the harness is given to an evaluation of the run's own sets."""
    if own := next((name for name in _OWN if getattr(options, name)), None):
        raise ProjectError(
            f"--{own.replace('_', '-')} is given without --lm-eval, and has no effect on the sets of the run",
            code="FG968",
            hint="name the tasks: --lm-eval arc_easy; or leave the option out",
        )


def _tasks(text: str) -> str:
    """Returns the names of tasks as they are given; an empty name, as from an unset shell variable, is an error."""
    if all(name.strip() for name in text.split(",")):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} does not name tasks, as in arc_easy,hellaswag")


def evaluate_by_harness(invocation: Invocation) -> int:
    """Evaluates a run on tasks of the harness, prints the numbers and stores them with the run; returns 0."""
    options = invocation.options
    if other := next((name for name in _OTHERS if getattr(options, name)), None):
        name = other.replace("_", "-")
        raise ProjectError(
            f"--{name} and --lm-eval are both given, and the harness brings its own rows and metrics",
            code="FG968",
            hint="leave one of them out",
        )
    command = find_command(options.lm_eval_command)
    weights = find_weights(options.folder, options.checkpoint)
    with tempfile.TemporaryDirectory(prefix="forgather-lm-eval-") as folder:
        model = Path(folder, "model")
        plan = plan_export(weights, None, str(model))
        if plan.project is not None and plan.targets is not None:
            ask_trust(plan.project, list(dict.fromkeys(plan.targets.values())))
        with redirect_stdout(sys.stderr):
            export(plan, dtype=None, max_shard_size="50GB")
        found = run_harness(command, model, Path(folder, "results"), _words(options))
    now = datetime.now(UTC)
    facts = {
        "lm_eval": {"version": found.version, "tasks": found.tasks, "options": _words(options)},
        "metrics": dict(found.metrics),
    }
    file = store_facts(weights, facts, command=["fgcli", *invocation.arguments], now=now)
    _print_result(weights, found, file, is_json=options.json)
    return 0


def _words(options: argparse.Namespace) -> list[str]:
    words = ["--tasks", options.lm_eval]
    for name, value in (("--include_path", options.include_path), ("--limit", options.limit)):
        words += [name, str(value)] if value is not None else []
    return words + (["--apply_chat_template"] if options.apply_chat_template else [])


def _print_result(weights: SavedWeights, found: HarnessResult, file: str, *, is_json: bool) -> None:
    if is_json:
        facts = {"run": weights.run.folder, "checkpoint": weights.folder, "step": weights.step}
        write_json({**facts, "metrics": found.metrics, "tasks": found.tasks, "file": file})
        return
    values = {name: value for name, value in found.metrics.items() if "_stderr" not in name}
    width = max(map(len, values), default=0)
    errors = {name: found.metrics.get(_error_name(name, found)) for name in values}
    lines = [
        f"{name:<{width}}  {value:.6g}" + (f"  +- {error:.2g}" if (error := errors[name]) is not None else "")
        for name, value in values.items()
    ]
    write_text("\n".join(lines))
    print_note(f"harness     lm_eval {found.version}")
    print_note(f"stored      {shlex.quote(near_path(file))}")


def _error_name(name: str, found: HarnessResult) -> str:
    """Returns the name of the standard error of a number: that of its task and metric, before the name of a filter."""
    return next((one for one in found.metrics if "_stderr" in one and one.replace("_stderr", "", 1) == name), "")
