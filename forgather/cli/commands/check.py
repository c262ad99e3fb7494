"""`fgcli check`: prints every problem that can be found in configs without running them. Constructs nothing."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from forgather.cli.diagnostic_output import finding_facts, grouped, not_checked, unchecked_facts
from forgather.cli.invocation import Invocation
from forgather.cli.options import OWN_NAMES, add_json, add_set
from forgather.cli.output import plural, write_findings, write_json
from forgather.errors import Diagnostic, ForgatherError, ProjectError, Severity
from forgather.project.check import CheckResult, check_project
from forgather.project.configs import config_files
from forgather.project.metadata_cache import load_meta
from forgather.project.path_display import Display
from forgather.project.project import Project
from forgather.project.reader import reader_for
from forgather.project.workspace import find_project, find_projects
from forgather.signatures.reader import Reader

CONFIG_OPTIONS = True
DESCRIPTION = """Find every error in configs that can be found without importing or constructing what they name: in
templates, the graph, constructors and their arguments, and settings that contradict each other. All problems are listed
with their places. The exit status is 1 if there is an error. A lint is a remark about something that works, but may not
be intended."""
EXAMPLES = """examples:
  fgcli check                              the default config
  fgcli check tiny.yaml fast.yaml -v       what could not be checked, and why
  fgcli check --all                        every config of the project
  fgcli check -r --json                    every project at or below this folder, as JSON"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="config to check (default: the config of -t)")
    parser.add_argument("--all", action="store_true", help="every config of the project; outside any, of all below")
    parser.add_argument("-r", "--recursive", action="store_true", help="every config of every project at or below -p")
    parser.add_argument("-v", "--verbose", action="store_true", help="list what could not be checked, and why")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")
    add_set(parser)
    add_json(parser)


class _Report(NamedTuple):
    """The results of the check of one config."""

    name: str
    display: Display
    checked: CheckResult


def run(invocation: Invocation) -> int:
    """Runs the command: prints the findings, and returns the exit status."""
    options = invocation.options
    reports = list(_everywhere(invocation) if options.all or options.recursive else _named(invocation))
    if options.json:
        write_json(_facts(reports))
    else:
        lines = _lines(reports, verbose=options.verbose)
        write_findings(lines, {name: file for report in reports for name, file in report.display.named.items()})
    bad = {Severity.ERROR, Severity.WARNING} if options.strict else {Severity.ERROR}
    return int(any(found.severity in bad for report in reports for found in report.checked.findings))


def _named(invocation: Invocation) -> Iterator[_Report]:
    reader: Reader | None = None
    given = [invocation.config] if invocation.config or not invocation.options.configs else []
    for name in dict.fromkeys([*given, *invocation.options.configs]):
        try:
            project = invocation.open_project(name)
        except ForgatherError as error:
            if error.span is None:
                raise
            # All configs of a project have the same `meta.yaml`, so its error is reported once.
            yield _broken(error, find_project(invocation.project_dir), "meta.yaml")
            return
        # One reader for all configs: it caches the signatures that it has read.
        reader = reader or reader_for(project.meta)
        yield _report(project, reader, project.config_name)


def _everywhere(invocation: Invocation) -> Iterator[_Report]:
    if invocation.options.configs or invocation.config:
        raise ProjectError(
            "configs are named together with --all or -r", code="FG455", hint="leave out the names, or --all and -r"
        )
    folders, several = _folders(invocation)
    for folder in folders:
        prefix = os.path.join(os.path.relpath(folder), "").removeprefix("./") if several else ""
        try:
            meta = load_meta(folder)
        except ForgatherError as error:
            yield _broken(error, folder, prefix + "meta.yaml")
            continue
        reader: Reader | None = None
        for name in config_files(meta.searchdir, meta.config_prefix):
            project = Project(name, os.path.join(folder, ""), overrides=invocation.options.overrides or ())
            reader = reader or reader_for(project.meta)
            yield _report(project, reader, prefix + name)


def _folders(invocation: Invocation) -> tuple[list[str], bool]:
    """Returns the folders of the projects to check, and a bool that is True if there can be several projects."""
    if not invocation.options.recursive:
        try:
            return [find_project(invocation.project_dir)], False
        except ProjectError:
            if not os.path.isdir(invocation.project_dir or "."):
                raise
    top = invocation.project_dir or "."
    if not os.path.isdir(top):
        raise ProjectError(f"no folder {top!r}", code="FG401", hint="name a folder to look in")
    found = list(find_projects(top))
    if not found:
        raise ProjectError(
            f"no project at or below {top!r}",
            code="FG400",
            hint="a project is a folder with a 'meta.yaml'; 'fgcli new project NAME' makes one",
        )
    return found, True


def _broken(error: ForgatherError, folder: str, name: str) -> _Report:
    """Returns the report of a project that cannot be opened because of an error in one of its files."""
    return _Report(name, Display(folder), CheckResult((error.diagnostic, *error.others)))


def _report(project: Project, reader: Reader, name: str) -> _Report:
    display = Display(project.meta.project_dir, project.meta.workspace_root)
    return _Report(name, display, check_project(project, reader, reserved=OWN_NAMES))


def _lines(reports: list[_Report], *, verbose: bool) -> list[str]:
    lines: list[str] = []
    shown: set[tuple[object, ...]] = set()
    for report in reports:
        # A finding in a template that several configs use is printed once, and counted for each config.
        fresh = [found for found in report.checked.findings if _key(found) not in shown]
        shown.update(_key(found) for found in fresh)
        lines += grouped(fresh, report.display)
        if verbose:
            lines += not_checked(report.checked.unchecked, report.display)
        lines.append(f"{report.name}: {_counts([report])}")
    if len(reports) > 1:
        lines.append(f"{len(reports)} configs: {_counts(reports)}")
    return lines or ["no configs"]


def _key(found: Diagnostic) -> tuple[object, ...]:
    # The context names the config, so it would make the same finding in a common template different for each config.
    return found.code, found.message, found.span, None if found.span else found.context


def _counts(reports: list[_Report]) -> str:
    found = Counter(found.severity for report in reports for found in report.checked.findings)
    unchecked = sum(len(report.checked.unchecked) for report in reports)
    words = [(Severity.ERROR, "error"), (Severity.WARNING, "warning"), (Severity.NOTE, "note"), (Severity.LINT, "lint")]
    parts = [plural(found[severity], word) for severity, word in words if found[severity]]
    if not found[Severity.ERROR] and not found[Severity.WARNING]:
        parts.insert(0, "ok")
    return ", ".join([*parts, *([f"{unchecked} not checked"] if unchecked else [])])


def _facts(reports: list[_Report]) -> dict[str, object]:
    return {
        "configs": [report.name for report in reports],
        "findings": [
            finding_facts(found, report.display, report.name) for report in reports for found in report.checked.findings
        ],
        "unchecked": [
            unchecked_facts(one, report.display, report.name) for report in reports for one in report.checked.unchecked
        ],
    }
