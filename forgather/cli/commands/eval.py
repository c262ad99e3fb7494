"""`fgcli eval`: evaluates the weights that a past run has saved. Runs the code that the run's config names."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from typing import Any

from forgather.cli.harness_output import add_harness, evaluate_by_harness, refuse_harness_options
from forgather.cli.invocation import Invocation
from forgather.cli.options import a_name, add_checkpoint, add_json, column_names
from forgather.cli.output import plural, print_error, print_findings, print_note, write_json, write_text
from forgather.cli.trusting import ask_trust
from forgather.errors import ProjectError
from forgather.launch.evaluation import Evaluation, EvaluationPlan, evaluate, plan_evaluation, store
from forgather.launch.multi_process import CHECKED, run_joined, start_processes
from forgather.launch.process_request import ProcessRequest
from forgather.launch.saved_weights import SavedWeights, find_weights
from forgather.launcher_env import is_worker
from forgather.project.path_display import near_path
from forgather.project.provenance import Row, Status, verify
from forgather.project.run_reader import open_run

EXECUTES = True
DESCRIPTION = """Evaluate the weights that a past run has saved, without training. The trainer of the run is rebuilt
from the record in its folder, the weights of a checkpoint are verified and loaded, and the run's evaluation sets are
evaluated. The metrics are printed, compared with what the run itself logged at that step, and stored with the run as
eval-TIME.json."""
EXAMPLES = """examples:
  fgcli eval output_models/tiny_llama                        the newest run and its newest checkpoint
  fgcli eval output_models/tiny_llama/runs/20260101T120000Z-tiny --checkpoint best
  fgcli eval output_models/tiny_llama/checkpoint-500 --json
  fgcli eval RUN --data tests.jsonl --out predictions.jsonl  the rows of a file, prepared as those of the run
  fgcli eval RUN --data tests.csv --columns text=review,label=stars
  fgcli eval RUN --data code --nproc 1                       one of several evaluation sets, in one process
  fgcli eval RUN --generate --limit 100 --out answers.jsonl  the answers to 100 prompts, and how many are right
  fgcli eval RUN --lm-eval arc_easy,hellaswag                tasks of lm-evaluation-harness, if it is installed"""
_TIMES = ("_runtime", "_per_second")
_SPEED = "rows/s"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("folder", metavar="FOLDER", help="a run, a checkpoint or an output folder", type=a_name)
    add_checkpoint(parser)
    parser.add_argument(
        "--data",
        metavar="DATA",
        type=a_name,
        help="the name of one evaluation set, or a .jsonl or .csv file (default: all evaluation sets of the run)",
    )
    parser.add_argument(
        "--columns",
        metavar="NAME=COLUMN",
        type=column_names,
        help="other column names of that file, as in text=review,label=stars (default: those of the run's own file)",
    )
    parser.add_argument(
        "--generate",
        action="store_true",
        help="generate the answer to each prompt, with the most likely token each time; a run with "
        "predict_with_generate does so without this option, and keeps its metrics (otherwise: exact match)",
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=_count_of_rows, help="generate, with answers of at most N tokens"
    )
    parser.add_argument(
        "--limit", metavar="N", type=_count_of_rows, help="generate the answers to the first N rows of each set"
    )
    parser.add_argument("--out", metavar="FILE", type=a_name, help="write each row's prediction to FILE, as JSON lines")
    parser.add_argument(
        "--nproc",
        "--nproc-per-node",
        type=_count,
        metavar="N",
        help="number of processes on this machine (default: as many as the run had)",
    )
    add_harness(parser)
    add_json(parser)


def _count_of_rows(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and 0 < int(text) <= 1024:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")


def run(invocation: Invocation) -> int:
    """Runs the command: evaluates the run in the requested number of processes, and returns the exit status."""
    options = invocation.options
    if is_worker(os.environ):
        return run_joined(partial(_evaluated, invocation))
    if options.lm_eval is not None:
        return evaluate_by_harness(invocation)
    refuse_harness_options(options)
    weights = find_weights(options.folder, options.checkpoint)
    _refuse_unwritable(options.out)
    plan = plan_evaluation(weights, options.data, options.columns, _generation(options))
    print_findings(weights.run.notes, weights.run.project_dir)
    plan.project.refuse_errors()
    ask_trust(plan.project)
    processes = options.nproc or weights.run.processes
    if processes == 1:
        return _evaluated(invocation, None, plan)
    # By this variable, messages of the processes name fgcli and not torchrun as the program that started them.
    os.environ[CHECKED] = "1"
    source = "--nproc" if options.nproc else "the run"
    # torchrun reads the words of the script, too, and takes --nproc for an abbreviation of several of its options.
    words = [re.sub(r"^--nproc(?=$|=)", "--nproc-per-node", word) for word in invocation.arguments]
    ending = start_processes(ProcessRequest(per_node=processes, source=source), words)
    if ending.error is not None:
        print_error(ending.error, weights.run.project_dir)
    return ending.status


def _generation(options: argparse.Namespace) -> dict[str, int] | None:
    """Returns the settings of generation that the command line names, or None if no answers are asked for."""
    given = {"generation_max_new_tokens": options.max_new_tokens, "generation_max_samples": options.limit}
    named = {name: value for name, value in given.items() if value is not None}
    return named if options.generate or named else None


def _refuse_unwritable(out: str | None) -> None:
    """Raises FG418 before the evaluation if the file for the predictions cannot be written."""
    if out is None:
        return
    is_new = not os.path.lexists(out)
    try:
        with open(out, "a", encoding="utf-8"):
            pass
        if is_new:
            os.remove(out)  # an evaluation that is refused later leaves nothing behind
    except OSError as error:
        raise ProjectError(
            f"the predictions cannot be written to {out!r}: {error.strerror or error}",
            code="FG418",
            hint="name a file in an existing folder",
        ) from None


def _evaluated(invocation: Invocation, member: Any, plan: EvaluationPlan | None = None) -> int:
    """Evaluates the run in the current process, and prints and stores the result if it is the main process.

    Args:
        invocation: the parsed command line.
        member: the current process as a `Peer` of several processes, or None if there is only one process.
        plan: the plan; None in one of several processes.

    Returns:
        0.
    """
    options = invocation.options
    is_main = member is None or member.is_main
    if plan is None:
        weights = _shared_weights(invocation, member)
        plan = plan_evaluation(weights, options.data, options.columns, _generation(options))
        member.begin_construction(plan.weights.run.folder)
    if is_main and not options.json:
        for message in plan.weights.skipped:
            print_note(f"skipped a checkpoint: {message}")
        for line in _head(plan):
            print_note(line)
    # With --json, and from the other processes, nothing but the result goes to the standard output.
    with redirect_stdout(sys.stderr) if options.json or not is_main else nullcontext():
        found = evaluate(plan, out=options.out, built=None if member is None else member.begin_run)
    if not is_main:
        return 0
    changed = [row for row in verify(plan.weights.run, plan.project.meta) if row.fate is Status.LOST]
    file = store(
        plan,
        found,
        command=["fgcli", *invocation.arguments],
        processes=1 if member is None else member.facts.world_size,
        now=datetime.now(UTC),
    )
    _print_result(plan, found, changed, file, options)
    return 0


def _shared_weights(invocation: Invocation, member: Any) -> SavedWeights:
    """Returns the weights that the main process has found; all processes must load the same ones."""
    options = invocation.options
    if member.is_main:
        weights = find_weights(options.folder, options.checkpoint)
        member.share("weights", {"run": weights.run.folder, "folder": weights.folder, "step": weights.step})
        return weights
    facts = member.share("weights")
    return SavedWeights(run=open_run(facts["run"]), folder=facts["folder"], step=facts["step"])


def _head(plan: EvaluationPlan) -> list[str]:
    weights = plan.weights
    what = "the model of the run's end" if weights.step is None else f"step {weights.step}, intact"
    return [
        f"run         {shlex.quote(near_path(weights.run.folder))}",
        f"checkpoint  {shlex.quote(near_path(weights.folder))}  ({what})",
        *([f"data        {plan.data}"] if plan.data is not None else []),
    ]


def _print_result(
    plan: EvaluationPlan, found: Evaluation, changed: list[Row], file: str, options: argparse.Namespace
) -> None:
    if options.json:
        write_json(
            {
                "run": plan.weights.run.folder,
                "checkpoint": plan.weights.folder,
                "step": plan.weights.step,
                "sets": list(found.sets),
                "metrics": import_module("forgather.ml.metrics").as_json(found.metrics),
                "logged": dict(found.logged),
                "differs": sorted(found.differences),
                "changed": [f"{row.what} {row.name}" for row in changed],
                "file": file,
            }
        )
        return
    write_text("\n".join(_table(found)))
    if found.differences:
        for name, (logged, now) in found.differences.items():
            print_note(f"logged      {name} was {logged!r}, and is {now!r} now")
    elif found.logged:
        print_note(f"logged      by the run at step {plan.weights.step}: {_all_equal(len(found.logged))}")
    if changed:
        things = ", ".join(f"{row.what} {row.name}" for row in changed[:3])
        print_note(f"changed     {plural(len(changed), 'thing')} since the run: {things}")
    if options.out is not None:
        print_note(f"predictions {shlex.quote(near_path(options.out))}  ({plural(found.predictions, 'row')})")
    print_note(f"stored      {shlex.quote(near_path(file))}")


def _all_equal(count: int) -> str:
    return "the metric is equal" if count == 1 else f"all {count} metrics are equal"


def _table(found: Evaluation) -> list[str]:
    """Returns a table of the metrics with a line for each metric and a column for each evaluation set."""
    format_perplexity = import_module("forgather.ml.number_format").format_perplexity
    columns: list[dict[str, str]] = []
    # The longest first: the name of a set can be the beginning of another one's.
    prefixes = sorted((f"eval_{name}_" if name else "eval_" for name in found.sets), key=len, reverse=True)
    by_prefix: dict[str, dict[str, Any]] = {prefix: {} for prefix in prefixes}
    for name, value in found.metrics.items():
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        by_prefix[prefix][name.removeprefix(prefix)] = value
    for name in found.sets:
        values = by_prefix[f"eval_{name}_" if name else "eval_"]
        cells = {one: f"{value:.6g}" for one, value in values.items() if not one.endswith(_TIMES) and one != "runtime"}
        if found.has_perplexity and (read := format_perplexity(values.get("loss"))):
            cells = {"loss": cells.pop("loss"), "perplexity": read, **cells}
        cells[_SPEED] = f"{values['samples_per_second']:.4g}"
        columns.append(cells)
    names = dict.fromkeys(name for cells in columns for name in cells if name != _SPEED)
    rows = [[name, *(cells.get(name, "-") for cells in columns)] for name in [*names, _SPEED]]
    if found.sets != [""]:
        rows.insert(0, ["", *found.sets])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[0] = max(widths[0], 10)
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
