"""`fgcli diff`: how the graphs of two configs differ. Constructs nothing."""

from __future__ import annotations

import argparse
from datetime import datetime

from forgather.cli.differences import difference_facts, difference_lines, paint, summary
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output
from forgather.cli.output import write_json, write_text
from forgather.config.diff import diff
from forgather.project.compared import Compared, named_config, open_config

TAKES_CONFIG = True
TROUBLE = 2
DESCRIPTION = """Show how two graphs differ: values, constructors, what is shared, each with the lines that cause it.
The exit status is 0 where they are the same, 1 where they differ, 2 in trouble. Nothing is imported or constructed."""
EXAMPLES = """examples:
  fgcli diff tiny fast                           two configs of the project
  fgcli diff tiny fast --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("a", metavar="A", help="a config: its name, or the path of its file")
    parser.add_argument("b", metavar="B", help="the same for the other side")
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Prints the differences and returns the exit status."""
    options = invocation.options
    now = datetime.now()
    old, new = (_opened(word, invocation, now) for word in (options.a, options.b))
    differences = diff(old.graph, new.graph)
    places = (old.place, new.place)
    if options.json:
        facts = {"a": old.title, "b": new.title, "same": not differences}
        write_json({**facts, "differences": difference_facts(differences, places)}, options.output)
    else:
        head = [f"--- {old.title}", f"+++ {new.title}", ""]
        lines = [*head, *difference_lines(differences, places), "", summary(differences)]
        write_text("\n".join(lines if differences else [summary(differences)]), options.output, paint=paint)
    return int(bool(differences))


def _opened(word: str, invocation: Invocation, now: datetime) -> Compared:
    return open_config(*named_config(word, invocation.project_dir), now)
