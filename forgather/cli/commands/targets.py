"""`fgcli targets`: lists the named objects that a config can build. Constructs nothing."""

from __future__ import annotations

import argparse

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_set
from forgather.cli.output import Line, print_findings, write_json, write_lines
from forgather.cli.palette import paint_row
from forgather.project.path_display import Display
from forgather.project.targets import target_facts

CONFIG_OPTIONS = True
OPTIONS_UNTOLD = True
DESCRIPTION = "List the targets of a config: what 'fgcli construct' and Project(...)(name) can build."
EXAMPLES = """example:
  fgcli -t tiny.yaml targets"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    add_set(parser)
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the targets, and returns the exit status."""
    project = invocation.open_project()
    display = Display(project.meta.project_dir, project.meta.workspace_root)
    targets = target_facts(project.graph)
    if invocation.options.json:
        write_json(
            {
                "config": project.config_name,
                "targets": [
                    {"name": target.name, "kind": target.kind, "summary": target.summary}
                    | ({"file": display(target.span.file), "line": target.span.line} if target.span else {})
                    for target in targets
                ],
            }
        )
    elif targets:
        name_width = max(len(target.name) for target in targets)
        kind_width = max(len(target.kind) for target in targets)
        rows = [f"{t.name:<{name_width}}  {t.kind:<{kind_width}}  {t.summary}".rstrip() for t in targets]
        write_lines([Line(row, paint_row, name_width + kind_width + 4) for row in rows])
    return int(print_findings(project.diagnostics, project.meta.project_dir))
