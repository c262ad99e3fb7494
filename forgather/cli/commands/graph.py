"""`fgcli graph`: what a config would build. Constructs nothing."""

from __future__ import annotations

import argparse
import json

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output, add_set
from forgather.cli.output import print_findings, write_text
from forgather.project.display import Display
from forgather.project.project import Project

CONFIG_OPTIONS = True
DESCRIPTION = """Print the objects that a config would build, with sharing, as a tree, as YAML that reads back to the
same graph, or as JSON for tools. Nothing is imported or constructed."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml graph
  fgcli -t tiny.yaml graph --format yaml -o frozen.yaml
  fgcli -t tiny.yaml graph --format json --set trainer_args.learning_rate=1e-4"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--format", choices=("tree", "yaml", "json"), default="tree", help="default: tree")
    add_set(parser)
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Prints the graph and returns the exit status."""
    options = invocation.options
    project = invocation.open_project()
    write_text(_text(project, "json" if options.json else options.format), options.output)
    return int(print_findings(project.diagnostics, project.meta.project_dir))


def _text(project: Project, form: str) -> str:
    if form == "yaml":
        from forgather.codegen.emit_yaml import emit_yaml

        return emit_yaml(project.graph)
    from forgather.config.show import to_json, tree

    if form == "tree":
        return tree(project.graph)
    display = Display(project.meta.project_dir, project.meta.workspace_root, relative_to_cwd=False)
    facts = to_json(project.graph, label=display, config=project.config_name)
    return json.dumps(facts, indent=2, ensure_ascii=False)
