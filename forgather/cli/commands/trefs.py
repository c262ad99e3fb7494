"""`fgcli trefs`: prints the templates that a config loads, and the reason for each. Constructs nothing."""

from __future__ import annotations

import argparse

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output
from forgather.cli.output import columns, print_findings, write_json, write_text
from forgather.cli.palette import Look, indent_of
from forgather.config.environment import TemplateUse
from forgather.project.path_display import Display

CONFIG_OPTIONS = True
OPTIONS_UNTOLD = True
DESCRIPTION = (
    "Show the templates that a config loaded as a tree: which template extends, includes or imports which, and where."
)
EXAMPLES = """example:
  fgcli -t tiny.yaml trefs"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the tree of templates, and returns the exit status."""
    project = invocation.open_project()
    display = Display(project.meta.project_dir, project.meta.workspace_root)
    uses = project.rendered.templates
    if invocation.options.json:
        write_json({"config": project.config_name, "templates": [_fact(use, display) for use in uses]},
                   invocation.options.output)  # fmt: skip
    else:
        write_text(_tree(uses, display), invocation.options.output, look=Look(None, indent_of, display.named))
    return int(print_findings(project.rendered.diagnostics, project.meta.project_dir))


def _fact(use: TemplateUse, display: Display) -> dict[str, object]:
    fact: dict[str, object] = {
        "name": use.name,
        "file": display(use.file),
        "line": use.line,
        "why": use.why,
        "parent": use.parent,
    }
    if use.by is not None:
        fact["by"] = {"file": display(use.by.file), "line": use.by.line}
    return fact


def _tree(uses: tuple[TemplateUse, ...], display: Display) -> str:
    children: dict[int | None, list[int]] = {}
    for position, use in enumerate(uses):
        children.setdefault(use.parent, []).append(position)
    rows: list[tuple[str, str]] = []
    stack = [(position, "", "") for position in reversed(children.get(None, []))]
    while stack:
        position, branch, indent = stack.pop()
        use = uses[position]
        why = "" if use.parent is None else f"{use.why} "
        place = display(use.file) + (f":{use.line}" if use.line > 1 else "")
        rows.append((f"{branch}{why}{use.name}", place))
        below = children.get(position, [])
        for number, child in reversed(list(enumerate(below))):
            last = number == len(below) - 1
            stack.append((child, indent + ("└── " if last else "├── "), indent + ("    " if last else "│   ")))
    width = max((len(name) for name, _ in rows), default=0)
    if (room := columns()) is not None and width + 2 + max((len(place) for _, place in rows), default=0) > room:
        # In a narrow window, an aligned column of places would wrap each line.
        width = 0
    return "\n".join(f"{name:<{width}}  {place}" for name, place in rows)
