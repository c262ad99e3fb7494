"""`fgcli diff`: prints the differences between the graphs of two configs. Constructs nothing."""

from __future__ import annotations

import argparse

from forgather.cli.diff_output import difference_facts, difference_lines, hang, paint, summary
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output
from forgather.cli.output import columns, print_findings, write_json, write_text
from forgather.cli.palette import Look
from forgather.project.comparison import compare
from forgather.project.comparison_sides import open_sides
from forgather.project.origin_labels import Labels
from forgather.project.path_display import Display

TAKES_CONFIG = True
TROUBLE = 2
DESCRIPTION = """Show how two graphs differ: in values, constructors and sharing, each with the lines that cause it. The
exit status is 0 if they are equal, 1 if they differ, 2 after an error. Nothing is imported or constructed."""
EXAMPLES = """examples:
  fgcli diff tiny fast                           two configs of the project
  fgcli diff tiny                                the last commit and the working tree
  fgcli diff tiny@HEAD~3                         a revision and the working tree
  fgcli diff tiny@v1.0 @v1.1                     two revisions of one config
  fgcli diff output_models/tiny_llama/runs/RUN   a past run, and what its config gives now
  fgcli diff RUN OTHER_RUN --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("a", metavar="A", nargs="?", help="a config, its file, CONFIG@REVISION, or the folder of a run")
    parser.add_argument("b", metavar="B", nargs="?", help="the same for the other side (default: A as it is now)")
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the differences, and returns the exit status."""
    options = invocation.options
    old, new = open_sides(options.a, options.b, invocation.config, invocation.project_dir)
    print_findings([*old.notes, *new.notes], invocation.project_dir)
    differences = compare(old, new)
    places = Labels(old.place, lambda: old.declared), Labels(new.place, lambda: new.declared)
    if options.json:
        facts = {"a": old.title, "b": new.title, "same": not differences}
        write_json({**facts, "differences": difference_facts(differences, places)}, options.output)
    else:
        head = [f"--- {old.title}", f"+++ {new.title}", ""]
        lines = [*head, *difference_lines(differences, places), "", summary(differences)]
        # The files of a Git revision are not on disk, so they get no links.
        displays = [side.place for side in (old, new) if isinstance(side.place, Display)]
        text = "\n".join(lines if differences else [summary(differences)])
        if columns() is not None and not options.output:
            for display in displays:
                text = display.shorten(text)
        files = {name: file for display in displays for name, file in display.named.items()}
        write_text(text, options.output, look=Look(paint, hang, files))
    return int(bool(differences))
