"""The Python files of a project that a graph needs.

Takes a graph and the folders it may import from, gives files. Keeps true: nothing is imported; an import that is not
of the project (a library) is left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from forgather.bounded import MAX_CODE_BYTES, read_text, walk_folders
from forgather.config.graph import Call, Graph
from forgather.config.traverse import all_nodes

_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import\b|import[ \t]+([\w., \t]+))", re.MULTILINE)
_LIMIT = 500
# A run's folder may be handed on: what is imported for its passwords stays at home.
_PRIVATE = re.compile(r"secret|credential|passw|api_?key", re.IGNORECASE)


def code_files(graph: Graph, project_dir: str, system_path: Iterable[str] = ()) -> list[str]:
    """Returns the Python files of a project that constructors name, and those that these import, as absolute paths.

    An imported file whose name speaks of secrets is left out.
    """
    folders = [project_dir, *system_path]
    found: dict[str, None] = {}
    todo = list(_named(graph, project_dir, folders))
    while todo and len(found) < _LIMIT:
        file = todo.pop(0)
        if file not in found:
            found[file] = None
            imported = _imported(file, [os.path.dirname(file), *folders])
            todo += [other for other in imported if not _PRIVATE.search(os.path.basename(other))]
    return list(found)


def _named(graph: Graph, project_dir: str, folders: list[str]) -> Iterator[str]:
    for _, node in all_nodes(graph):
        module = node.constructor.partition(":")[0] if isinstance(node, Call) else ""
        if module.endswith(".py"):
            file = os.path.normpath(os.path.join(project_dir, module))
            if os.path.isfile(file):
                yield file
        elif module:
            yield from _module(module, folders[1:])


def _imported(file: str, folders: list[str]) -> Iterator[str]:
    try:
        text = read_text(file, MAX_CODE_BYTES)
    except (OSError, UnicodeDecodeError):
        return
    for match in _IMPORT.finditer(text):
        for name in (match[1] or match[2]).split(","):
            words = name.split()
            if words:
                yield from _module(words[0].lstrip("."), folders)


def _module(name: str, folders: list[str]) -> Iterator[str]:
    """Yields the file of a module, or all files of the package that it is in."""
    top = name.split(".")[0]
    for folder in folders:
        file, package = os.path.join(folder, f"{top}.py"), os.path.join(folder, top)
        if os.path.isfile(file):
            yield file
            return
        if top and os.path.isfile(os.path.join(package, "__init__.py")):
            for here, inner, files in walk_folders(package):
                inner[:] = sorted(item for item in inner if not item.startswith((".", "__")))
                yield from (os.path.join(here, item) for item in sorted(files) if item.endswith(".py"))
            return
