"""`fgcli trust`: sets which code may run, and which environment variables templates may read."""

from __future__ import annotations

import argparse

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import write_json, write_text
from forgather.project.trust import Trust, parse_trust, store_trust, stored_trust, trust_file

DESCRIPTION = """Allow the Python code of a folder to run, configs to call a package, or templates to read an
environment variable. This is stored in a file of the user, never in a project. Configs that call only the usual parts
of PyTorch, transformers and the other listed packages do not need it."""
EXAMPLES = """examples:
  fgcli trust .                          the code of the project in this folder, now and after changes
  fgcli trust ~/shared/models sklearn    a folder, and a package
  fgcli trust torch.overrides            a part of PyTorch that not every config may call
  fgcli trust --env 'MY_DATA_*'          variables that templates may read with env()
  fgcli trust --list
  fgcli trust . --remove"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("words", nargs="*", metavar="DIR|PACKAGE", help="folder of code, or name of a package")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="environment variable; * matches any text"
    )
    parser.add_argument("--list", action="store_true", help="print what is trusted")
    parser.add_argument("--remove", action="store_true", help="stop trusting it")
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: changes or prints the list of trusted code and variables, and returns the exit status."""
    options = invocation.options
    named = _named(options)
    kept = stored_trust()
    changed = kept.minus(named) if options.remove else kept.plus(named)
    if changed != kept:
        store_trust(changed)
    if options.json:
        write_json({"file": trust_file(), **_facts(changed)})
    elif options.list or named == Trust():
        write_text("\n".join(_lines(changed)) or "nothing is trusted")
    else:
        write_text("\n".join(_lines(named, "no longer trusted: " if options.remove else "trusted: ")))
    return 0


def _named(options: argparse.Namespace) -> Trust:
    variables = Trust(variables=tuple(options.env))
    if not options.remove:
        return parse_trust(options.words).plus(variables)
    # A folder that is no longer trusted may have been removed, so its existence is not checked.
    packages = [word for word in options.words if word in stored_trust().packages]
    folders = [word for word in options.words if word not in packages]
    return parse_trust(folders, lambda word: True).plus(Trust(packages=tuple(packages))).plus(variables)


def _facts(trust: Trust) -> dict[str, list[str]]:
    return {"folders": list(trust.folders), "packages": list(trust.packages), "variables": list(trust.variables)}


def _lines(trust: Trust, head: str = "") -> list[str]:
    kinds = {"folder": trust.folders, "package": trust.packages, "variable": trust.variables}
    return [f"{head}{kind} {item}" for kind, items in kinds.items() for item in items]
