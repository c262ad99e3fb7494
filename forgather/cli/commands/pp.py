"""`fgcli pp`: prints a config as text, after all templates are applied. Constructs nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output, add_set
from forgather.cli.output import Line, columns, print_findings, print_note, write_json, write_lines, write_text
from forgather.cli.palette import Look, indent_of, paint_yaml, styled
from forgather.errors import Severity
from forgather.project.project import Project

if TYPE_CHECKING:
    from forgather.project.origin_labels import Labels

CONFIG_OPTIONS = True
DESCRIPTION = """Print the text of a config after all templates are applied. Nothing is imported or constructed.
With --set, the changed graph is printed as YAML, because changes apply to values and not to text."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml pp
  fgcli -t tiny.yaml pp --map              the template and line that wrote each line
  fgcli -t tiny.yaml pp --annotate         the same, and which lines are overridden, by what
  fgcli -t tiny.yaml pp --set trainer_args.max_steps=10"""


_LOOK = Look(paint_yaml, indent_of)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    origins = parser.add_mutually_exclusive_group()
    origins.add_argument("--map", action="store_true", help="print template:line next to each line")
    origins.add_argument(
        "--annotate",
        action="store_true",
        help="as --map; `x` marks overridden lines, and a comment names the line that overrides",
    )
    add_set(parser)
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the text, and returns the exit status."""
    options = invocation.options
    project = invocation.open_project()
    findings = [*project.meta.diagnostics, *project.rendered.diagnostics]
    if options.overrides:
        findings += [found for found in project.graph.diagnostics if found.severity is not Severity.LINT]
    if options.map and options.overrides:
        print_note("note: --map shows the text before --set, which changes the graph")
    if options.annotate:
        _write_annotated(project, options)
    elif options.json:
        write_json({"config": project.config_name, "lines": _lines(project)}, options.output)
    elif options.map:
        labels = _labels(project)
        write_lines(_from_first_text(_mapped(project, labels), options.output), options.output, files=labels.named)
    else:
        text = _text(project)
        write_text(text if _is_exact(options.output) else text.lstrip("\n"), options.output, look=_LOOK)
    return int(print_findings(findings, project.meta.project_dir))


def _is_exact(output: str | None) -> bool:
    """Returns True if the text is written unchanged, as to a file or a pipe.

    On a terminal, the empty lines at the beginning of the text are left out.
    """
    return output is not None or columns() is None


def _from_first_text(rows: list[Line], output: str | None) -> list[Line]:
    if _is_exact(output):
        return rows
    first = next((number for number, row in enumerate(rows) if row.text.strip(" |x")), 0)
    return rows[first:]


def _text(project: Project) -> str:
    if not project.overrides:
        return project.rendered.text
    from forgather.codegen.emit_yaml import emit_yaml

    return emit_yaml(project.graph)


def _write_annotated(project: Project, options: argparse.Namespace) -> None:
    from forgather.config.insight.line_annotations import annotate

    labels = _labels(project)
    lines = annotate(project.rendered, project.graph, project.overrides)
    if options.json:
        facts = [{**fact, **labels.line(line)} for fact, line in zip(_lines(project), lines, strict=True)]
        write_json({"config": project.config_name, "lines": facts}, options.output)
        return
    while lines and not lines[-1].text:
        lines.pop()
    places = [labels.origin(line.origin) for line in lines]
    width = max(map(len, places), default=0)
    rows = []
    for place, line in zip(places, lines, strict=True):
        notes = labels.notes(line)
        head = f"{place:<{width}} {'|' if line.counts else 'x'} "
        rows.append(
            _row(head, line.text.rstrip() if notes else line.text, f"  # {notes}" if notes else "", counts=line.counts)
        )
    write_lines(_from_first_text(rows, options.output), options.output, files=labels.named)


def _labels(project: Project) -> Labels:
    # A late import: plain text needs no labels.
    from forgather.project.origin_labels import Labels

    return Labels.of(project)


def _lines(project: Project) -> list[dict[str, object]]:
    labels = _labels(project)
    facts: list[dict[str, object]] = []
    for line, origin in project.rendered.source_map.lines():
        fact: dict[str, object] = {"text": line}
        if origin is not None:
            fact |= labels.place(origin.site) | {"template": origin.site.template}
            fact["via"] = [labels.place(site) for site in origin.sites[-2::-1]]
            fact["approximate"] = origin.approximate
        facts.append(fact)
    return facts


def _mapped(project: Project, labels: Labels) -> list[Line]:
    pairs = [(labels.origin(origin), line) for line, origin in project.rendered.source_map.lines()]
    if pairs and not pairs[-1][1]:
        pairs.pop()
    width = max((len(place) for place, _ in pairs), default=0)
    return [_row(f"{place:<{width}} | ", line) for place, line in pairs]


def _row(head: str, text: str, notes: str = "", *, counts: bool = True) -> Line:
    """Returns a line of the output: the origin of a line of the config, the line, and notes.

    Args:
        head: the origin of the line: template and line number.
        text: the line of the config.
        notes: the comment after the line.
        counts: True if the line has an effect; a line without an effect is dim.
    """

    def paint(line: str) -> str:
        if not counts:
            return styled("dim", line)
        comment = len(line) - len(notes)
        bar = len(head) - 2
        place, sign = line[:bar], line[bar : len(head)]
        return place + styled("dim", sign) + paint_yaml(line[len(head) : comment]) + styled("dim", line[comment:])

    return Line(f"{head}{text}{notes}".rstrip(), paint, len(head) + indent_of(text))
