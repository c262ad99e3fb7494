"""`fgcli tlist`: lists the templates that a project can extend and include.

Outside a project, the templates of the library are listed.
"""

from __future__ import annotations

import argparse
import os

from forgather.bounded import walk_folders
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import print_findings, write_json, write_text
from forgather.cli.palette import Look, hang_of_row, paint_row
from forgather.project.locations import library_dir
from forgather.project.metadata_cache import load_meta
from forgather.project.path_display import Display
from forgather.project.workspace import find_project, project_above

DESCRIPTION = """List the templates on the project's search path: those of the project, the workspace and the library.
Of two with the same name, the first is used and the other is marked as hidden. Outside a project, only the library is
listed."""
EXAMPLES = """example:
  fgcli -p projects/tiny_llama tlist"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the templates, and returns the exit status."""
    meta = None
    if invocation.project_dir is not None or project_above(os.getcwd()) is not None:
        meta = load_meta(find_project(invocation.project_dir))
    display = Display(meta.project_dir, meta.workspace_root) if meta else Display()
    facts = _templates(meta.searchpath if meta else (library_dir(),), display)
    if invocation.options.json:
        write_json({"project": meta.name if meta else None, "templates": facts})
    elif facts:
        width = max(len(str(fact["name"])) for fact in facts)
        hidden = {True: "  (hidden by the one above)", False: ""}
        rows = [f"{fact['name']:<{width}}  {fact['file']}{hidden[fact['hidden'] is True]}" for fact in facts]
        write_text("\n".join(rows), look=Look(paint_row, hang_of_row, display.named))
    return int(print_findings(meta.diagnostics, meta.project_dir)) if meta else 0


def _templates(searchpath: tuple[str, ...], display: Display) -> list[dict[str, object]]:
    found: dict[str, list[str]] = {}
    for top in searchpath:
        for here, folders, files in walk_folders(top):
            # The list is changed in place, because the walk enters only the folders that remain in it.
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
            for file in sorted(files):
                if file.endswith(".yaml") and not file.startswith("."):
                    path = os.path.join(here, file)
                    found.setdefault(os.path.relpath(path, top).replace(os.sep, "/"), []).append(path)
    return [
        {"name": name, "file": display(path), "hidden": position > 0}
        for name, paths in sorted(found.items())
        for position, path in enumerate(paths)
    ]
