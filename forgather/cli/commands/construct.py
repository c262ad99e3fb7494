"""`fgcli construct`: builds targets and prints the objects. Runs the code that the config names."""

from __future__ import annotations

import argparse
import pprint

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output, add_set, add_var, construction_variables
from forgather.cli.output import print_findings, write_json, write_text
from forgather.cli.trusting import ask_trust

CONFIG_OPTIONS = True
EXECUTES = True
DESCRIPTION = """Build targets of a config, in one construction, and print them.
This imports and calls what the config names."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml construct model
  fgcli -t tiny.yaml construct model tokenizer --json
  fgcli -t tiny.yaml construct trainer_args --var run_dir=/tmp/run"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="target to build; 'fgcli targets' lists them")
    add_var(parser)
    add_set(parser)
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: builds and prints the targets, and returns the exit status."""
    options = invocation.options
    project = invocation.open_project()
    project.refuse_errors()
    print_findings(project.diagnostics, project.meta.project_dir)
    ask_trust(project, options.targets)
    built = project(options.targets, **construction_variables(invocation))
    if options.json:
        facts = {name: _fact(value) for name, value in built.items()}
        write_json({"config": project.config_name, "targets": facts}, options.output)
    elif len(built) == 1:
        write_text(_shown(built[options.targets[0]]), options.output)
    else:
        write_text("\n".join(f"{name}: {_shown(value)}" for name, value in built.items()), options.output)
    return 0


def _shown(value: object) -> str:
    return value if isinstance(value, str) else pprint.pformat(value, width=100, sort_dicts=False)


def _fact(value: object) -> dict[str, object]:
    kind = type(value)
    fact: dict[str, object] = {"type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")}
    if value is None or isinstance(value, (str, int, float, bool, list, tuple, dict)):
        fact["value"] = value
    else:
        fact["repr"] = repr(value)
    return fact
