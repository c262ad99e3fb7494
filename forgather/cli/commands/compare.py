"""`fgcli compare`: compares past and present runs, in the terminal or as a page. Constructs nothing."""

from __future__ import annotations

import argparse
import os

from forgather.cli.browser import open_page
from forgather.cli.comparison_output import comparison_facts, comparison_lines
from forgather.cli.invocation import Invocation
from forgather.cli.options import a_name, add_json, add_output
from forgather.cli.output import columns, print_findings, write_json, write_lines, write_text
from forgather.errors import ProjectError
from forgather.runs.compared_run import open_all
from forgather.runs.comparison import Comparison
from forgather.runs.run_choice import RUN_HELP, folder_of

DESCRIPTION = """Compare runs: which one is best, by how much, and what differs between them, each value with the
template and the line that set it. With -o x.html, the result is one page for a browser that needs no network: curves,
tables, and plots of the values that differ. Runs that differ in seeds alone are grouped. No run folder is changed."""
EXAMPLES = """examples:
  fgcli compare output_models                                    all runs below a folder
  fgcli compare output_models -o runs.html --open                as a page
  fgcli compare output_models/a/runs/RUN output_models/b/runs/RUN
  fgcli compare output_models --metric eval_accuracy --json"""
_FORMS = {".html": "page", ".htm": "page", ".json": "data", ".txt": "text", "": "text"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"folder that contains runs, {RUN_HELP}")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        type=a_name,
        help="the metric that ranks the runs (default: metric_for_best_model, else eval_loss, else another one)",
    )
    parser.add_argument(
        "--best",
        choices=("min", "max"),
        help="whether the lowest or the highest value is best (default: as the runs recorded it, else by the name)",
    )
    parser.add_argument("--full", action="store_true", help="embed every point of the curves in the page")
    parser.add_argument("--open", action="store_true", help="show the page in the browser; needs -o")
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the comparison or writes the page, and returns the exit status."""
    options = invocation.options
    form = _form(options)
    top = options.project or os.curdir
    runs, findings = open_all([folder_of(word, top) for word in options.runs], is_full=options.full)
    comparison = Comparison(runs, metric=options.metric, best=options.best)
    print_findings([*findings, *comparison.notes])
    if form == "page":
        # A late import: only a page needs it.
        from forgather.runs.comparison_page.page import page, page_data

        title = f"{len(runs)} runs: {', '.join(dict.fromkeys(run.config for run in runs))}"
        write_text(page(page_data(comparison, is_full=options.full), title), options.output, is_hidden=True)
    elif form == "data":
        write_json(comparison_facts(comparison), options.output)
    else:
        write_lines(comparison_lines(comparison, columns()), options.output)
    if options.open:
        open_page(options.output)
    return 0


def _form(options: argparse.Namespace) -> str:
    """Returns what is written, by the options and the ending of the output file: "page", "data" or "text".

    Raises:
        ProjectError: FG450 if the options contradict each other, or if the name of the file has an unknown ending.
    """
    ending = os.path.splitext(options.output or "")[1].lower()
    form = "data" if options.json else _FORMS.get(ending)
    if form is None:
        raise ProjectError(
            f"a comparison cannot be written as {ending!r}",
            code="FG450",
            hint="-o x.html writes a page, -o x.json data, and -o x.txt text",
        )
    if options.json and _FORMS.get(ending) == "page":
        raise ProjectError(
            "two formats are given: --json and a page", code="FG450", hint="leave out --json, or write -o x.json"
        )
    if form != "page":
        unused = next((name for name in ("open", "full") if getattr(options, name)), None)
        if unused is not None:
            raise ProjectError(
                f"--{unused} is about a page, and none is written", code="FG450", hint="write one: -o x.html"
            )
    return form
