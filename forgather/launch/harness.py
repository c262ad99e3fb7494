"""Evaluates a past run with lm-evaluation-harness, which runs as a process of an environment of its own.

Takes the weights that `saved_weights` has found; gives the numbers of each task. The model is exported into a temporary
folder first, an adapter merged into its base model, so the harness sees what any program of transformers would load.
Nothing of the harness is imported.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather.errors import ProjectError

_STANDARD_ERROR = 2
COMMANDS = ("lm_eval", "lm-eval")
_INSTALL = (
    "install it in an environment of its own: python -m venv lm, then lm/bin/pip install 'lm_eval[hf]', and give "
    "--lm-eval-command lm/bin/lm_eval"
)


@dataclass(frozen=True, kw_only=True)
class HarnessResult:
    """The result of an evaluation by the harness.

    Args:
        metrics: the numbers, by the names of task and metric, as in `arc_easy_acc` and `arc_easy_acc_stderr`.
        tasks: for each task its version and its numbers of rows.
        version: the version of the harness.
    """

    metrics: Mapping[str, float]
    tasks: Mapping[str, Mapping[str, Any]]
    version: str


def find_command(words: str | None) -> list[str]:
    """Returns the words that start the harness.

    Args:
        words: the words that the user named; None to search for `lm_eval` on the path.

    Raises:
        ProjectError: FG966 if there is no such command.
    """
    names = [shlex.split(words)] if words else [[name] for name in COMMANDS]
    for name in names:
        if name and (found := shutil.which(os.path.expanduser(name[0]))) is not None:
            return [found, *name[1:]]
    what = f"{words!r} is not a command" if words else "lm_eval is not on the path"
    raise ProjectError(f"lm-evaluation-harness is not installed: {what}", code="FG966", hint=_INSTALL)


def run_harness(command: Sequence[str], model: Path, into: Path, options: Sequence[str]) -> HarnessResult:
    """Runs the harness, whose messages go to the standard error stream, and returns its result.

    Args:
        command: the words that start it.
        model: the folder of the exported model.
        into: a folder for the result.
        options: further words, such as `--tasks arc_easy`.

    Raises:
        ProjectError: FG967 if it fails, or if it leaves no result.
    """
    words = [*command, "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=auto"]
    words += ["--output_path", str(into), *options]
    # Its table must not go to the standard output, which is for our own result.
    ended = subprocess.run(words, stdout=_STANDARD_ERROR, check=False)
    if ended.returncode != 0:
        raise ProjectError(
            f"lm_eval ended with status {ended.returncode}",
            code="FG967",
            hint="its messages are above; 'lm_eval ls tasks' lists the tasks, and --include-path adds a folder with "
            "task files",
        )
    files = sorted(into.rglob("results_*.json"), key=os.path.getmtime)
    if not files:
        raise ProjectError("lm_eval wrote no result", code="FG967", hint="its messages are above")
    return read_result(files[-1])


def read_result(file: Path) -> HarnessResult:
    """Returns the result in a file that the harness has written.

    Args:
        file: the file, `results_<time>.json`.

    Raises:
        ProjectError: FG967 if the file is not such a result.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        metrics = {
            name: value for task, found in document["results"].items() for name, value in _numbers(task, found).items()
        }
        rows, versions = document.get("n-samples", {}), document.get("versions", {})
        tasks = {task: {"version": versions.get(task), "rows": rows.get(task)} for task in document["results"]}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ProjectError(
            f"{str(file)!r} is not a result of lm_eval: {type(error).__name__}: {error}",
            code="FG967",
            hint="the results of lm_eval 0.4 can be read",
        ) from None
    if not metrics:
        raise ProjectError(f"{str(file)!r} has no numbers", code="FG967", hint="name tasks that compute a metric")
    return HarnessResult(metrics=metrics, tasks=tasks, version=str(document.get("lm_eval_version", "")))


def _numbers(task: str, found: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a task. Their keys are `<metric>,<filter>`, and the filter of most tasks is `none`."""
    numbers: dict[str, float] = {}
    for key, value in found.items():
        metric, comma, filtered = key.partition(",")
        # Entries without a filter are facts about the task; a group has "N/A" where there is no number.
        if comma and isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{task}_{metric}" + ("" if filtered == "none" else f"_{filtered}")] = value
    return numbers
