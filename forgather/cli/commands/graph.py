"""`fgcli graph`: prints the objects that a config would build. Constructs nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys

from forgather.cli.browser import open_page
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output, add_set
from forgather.cli.output import columns, print_findings, print_note, write_text
from forgather.cli.palette import Look, indent_of, paint_tree, paint_yaml
from forgather.errors import ProjectError, nearest
from forgather.project.path_display import Display
from forgather.project.project import Project

CONFIG_OPTIONS = True
DESCRIPTION = """Show the objects that a config would build, with sharing: as a tree, as YAML that reads back to the
same graph, as JSON for tools, as a flowchart for Mermaid or Graphviz, or as a page to look at in a browser, which also
has the templates, the text, and the origin of each value. Nothing is imported or constructed."""
_ENDINGS = {
    "": "tree", ".txt": "tree", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".html": "html", ".htm": "html",
    ".mmd": "mermaid", ".mermaid": "mermaid", ".dot": "dot", ".gv": "dot",
}  # fmt: skip
_USUAL = ".html, .mmd, .dot, .yaml, .json and .txt"
_PICTURES = (".svg", ".png", ".pdf", ".jpg")
_LOOKS = {"tree": Look(paint_tree, indent_of), "yaml": Look(paint_yaml)}
FORMATS = ("tree", "yaml", "json", "html", "mermaid", "dot")
EXAMPLES = """examples:
  fgcli -t tiny.yaml graph
  fgcli -t tiny.yaml graph --format yaml -o frozen.yaml
  fgcli -t tiny.yaml graph --format json --set trainer_args.learning_rate=1e-4
  fgcli -t tiny.yaml graph -o page.html --open
  fgcli -t tiny.yaml graph --format dot | dot -Tsvg > graph.svg"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("--format", choices=FORMATS, help="default: tree, or what the name after -o ends in")
    parser.add_argument("--open", action="store_true", help="show the page in the browser; needs -o")
    add_set(parser)
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the graph, and returns the exit status."""
    options = invocation.options
    form = _form(options)
    project = invocation.open_project()
    width = None if options.output else columns()
    write_text(_text(project, form, width), options.output, look=_LOOKS.get(form))
    if options.open:
        open_page(options.output)
    return int(print_findings(project.diagnostics, project.meta.project_dir))


def _form(options: argparse.Namespace) -> str:
    """Returns the name of the output format, from the options or from the ending of the output file.

    Raises:
        ProjectError: FG450 if two formats are given, if an HTML page would be written to a terminal, if there is no
            page to open, or if the name of the file has an unknown ending.
    """
    if options.json and options.format not in (None, "json"):
        raise ProjectError(
            f"two formats are given: json and {options.format}", code="FG450", hint="leave out --json or --format"
        )
    form = "json" if options.json else options.format or ("html" if options.open else _format_of_file(options.output))
    if options.open and (form != "html" or not options.output):
        found = "it is not written to a file" if form == "html" else f"the format is {form}"
        raise ProjectError(
            f"there is no page to open: {found}", code="FG450", hint="write one: --format html -o page.html --open"
        )
    if form == "html" and not options.output and sys.stdout is not None and sys.stdout.isatty():
        raise ProjectError(
            "a page is for a browser, not for the terminal", code="FG450", hint="add -o page.html, and --open to see it"
        )
    return str(form)


def _format_of_file(file: str | None) -> str:
    ending = os.path.splitext(file or "")[1].lower()
    # The name of a pipe or of another special file, such as /dev/fd/63, has no ending that could name a format.
    if ending in _ENDINGS or (file and os.path.exists(file) and not os.path.isfile(file)):
        return _ENDINGS.get(ending, "tree")
    close = nearest(ending, [known for known in _ENDINGS if known])
    meant = close if close and close.startswith("did") else f"it is one of {_USUAL}"
    if ending in _PICTURES:
        meant = f"Graphviz draws pictures: fgcli graph --format dot | dot -T{ending[1:]}"
    raise ProjectError(
        f"no graph format has the ending {ending!r}",
        code="FG450",
        hint=f"{meant}; --format writes any of them to a file of any name",
    )


def _text(project: Project, form: str, width: int | None) -> str:
    """Returns the graph of a project as text.

    Args:
        project: the project, opened with the config.
        form: the format, which is one of `FORMATS`.
        width: the width of the terminal, to which a tree is fitted, or None if the output is not a terminal.
    """
    if form == "html":
        return config_page(project)
    if form == "mermaid":
        from forgather.codegen.mermaid import mermaid, too_large

        text = mermaid(project.graph)
        if problem := too_large(text):
            print_note(f"warning: {problem}; --format html or dot has no such limit")
        return text
    if form == "dot":
        from forgather.codegen.dot import dot

        return dot(project.graph)
    if form == "yaml":
        from forgather.codegen.emit_yaml import emit_yaml

        return emit_yaml(project.graph)
    from forgather.config.insight.show import to_json, tree

    if form == "tree":
        text = tree(project.graph, width=width or 0)
        return Display(project.meta.project_dir, project.meta.workspace_root).shorten(text) if width else text
    facts = to_json(project.graph, label=_display(project), config=project.config_name)
    return json.dumps(facts, indent=2, ensure_ascii=False)


def config_page(project: Project) -> str:
    """Returns an HTML page that shows a config: the objects, the templates, and the text."""
    from forgather.codegen.page.page import page, page_data

    return page(
        page_data(
            project.graph,
            project.rendered,
            shorten=_display(project),
            config=project.config_name,
            project=project.meta.name,
            overrides=project.overrides,
            findings=project.diagnostics,
        )
    )


def _display(project: Project) -> Display:
    # Relative to the project: what is written must not depend on the working folder.
    return Display(project.meta.project_dir, project.meta.workspace_root, relative_to_cwd=False)
