"""`fgcli code`: writes Python source that builds the objects of a config. Imports and constructs none of them."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output, add_set
from forgather.cli.output import plural, print_findings, print_note, write_json, write_text
from forgather.errors import ProjectError

if TYPE_CHECKING:
    from forgather.codegen.emit_python import PythonCode
    from forgather.config.graph import Graph
    from forgather.project.project import Project

CONFIG_OPTIONS = True
DESCRIPTION = """Write a Python module whose function build() makes the same objects by plain calls, without templates
and YAML. A shared value becomes a variable, !var a parameter, and !partial functools.partial. --verify runs the module
and the config on stand-ins for everything that they call, and compares each call. Nothing that the config names is
imported."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml code
  fgcli -t tiny.yaml code model tokenizer -o model.py
  fgcli -t tiny.yaml code --verify --set trainer_args.max_steps=20 -o train_tiny.py"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="target to build (default: main)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="test that the code makes the calls of the config; without -o, print only the result",
    )
    parser.add_argument("--force", action="store_true", help="let -o replace a file that exists")
    add_set(parser)
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: writes the code, and returns the exit status."""
    from forgather.codegen.emit_python import Setting, emit_python
    from forgather.project.rendered_variable import with_rendered
    from forgather.project.seeding import written_seed

    options = invocation.options
    if not options.force:
        _refuse_replacing(options.output)
    project = invocation.open_project()
    project.refuse_errors()
    print_findings(project.diagnostics, project.meta.project_dir)
    folder = os.path.dirname(os.path.abspath(options.output)) if options.output else project.meta.project_dir
    setting = Setting(
        config=project.config_name,
        project=project.meta.name,
        project_dir=project.meta.project_dir,
        folder=folder,
        system_path=tuple(project.meta.system_path),
        seed=written_seed(project.graph, project.meta),
    )
    graph = with_rendered(project.graph, project.rendered.text)
    code = emit_python(graph, options.targets or ["main"], setting)
    calls = _verified(project, graph, code, folder) if options.verify else None
    if options.json:
        verified = {} if calls is None else {"verified_calls": calls}
        facts = {"code": code.text, "targets": code.targets, "parameters": code.parameters, "imports": code.imports}
        write_json({"config": project.config_name, **facts, **verified}, options.output)
    elif calls is None or options.output:
        write_text(code.text, options.output)
    if calls is not None and (options.json or options.output):
        print_note(_verdict(calls))
    elif calls is not None:
        write_text(_verdict(calls))
    return 0


def _refuse_replacing(file: str | None) -> None:
    """Raises FG418 if `-o` names a file that is not empty, because generated code is often edited by hand."""
    if file and os.path.isfile(file) and os.path.getsize(file):
        raise ProjectError(
            f"{file!r} exists already, and may have been edited",
            code="FG418",
            hint="name another file with -o, or replace it with --force",
        )


def _verdict(calls: int) -> str:
    return f"verified: {plural(calls, 'call')} equal"


def _verified(project: Project, graph: Graph, code: PythonCode, folder: str) -> int:
    from forgather.verification.prove import prove

    place = os.path.join(folder, "generated.py")
    return prove(graph, code.text, code.targets, code.parameters, project_dir=project.meta.project_dir, file=place)
