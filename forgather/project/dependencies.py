"""The files that a run depends on: Python files of the project, and data.

The input is a graph and the folders from which it may import modules; the output is source files, and facts about data
files (size, time, digest), with the changes since the facts were recorded. Nothing is imported. Imports of installed
libraries are not followed.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from forgather.bounded import MAX_CODE_BYTES, TooManyEntriesError, matching_files, read_text, walk_folders
from forgather.config.graph import Call, Graph, Scalar
from forgather.config.path import GraphPath, Key, format_path
from forgather.config.traverse import all_nodes, walk

_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import\b|import[ \t]+([\w., \t]+))", re.MULTILINE)
_LIMIT = 500
# A run's folder may be passed on to others, so a module that holds passwords is not copied into it.
_PRIVATE = re.compile(r"secret|credential|passw|api_?key", re.IGNORECASE)


def code_files(graph: Graph, project_dir: str, system_path: Iterable[str] = ()) -> list[str]:
    """Returns the absolute paths of the project's Python files that constructors name, and of files that these import.

    An imported file is left out if its name suggests that it contains secrets.

    Args:
        graph: the graph.
        project_dir: the project's folder.
        system_path: further folders that modules are imported from.
    """
    folders = [project_dir, *system_path]
    found: dict[str, None] = {}
    todo = list(_code_named(graph, project_dir, folders))
    while todo and len(found) < _LIMIT:
        file = todo.pop(0)
        if file not in found:
            found[file] = None
            imported = _imported(file, [os.path.dirname(file), *folders])
            todo += [other for other in imported if not _PRIVATE.search(os.path.basename(other))]
    return list(found)


def _code_named(graph: Graph, project_dir: str, folders: list[str]) -> Iterator[str]:
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
    """Yields the file of a module, or all files of its package."""
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


_MAX_DIGESTED = 200_000_000
_MAX_FILES = 2_000
_NAMED = 5
# Bytes that are read for digests before a run starts; further files are compared by size and time.
_MAX_TOTAL = 2_000_000_000
_WRITTEN = ("output_dir", "logging_dir", "log_dir", "run_dir", "resume_from_checkpoint", "cache_dir")
"""The settings that name files which a run writes, and does not read as data."""


def data_facts(graph: Graph, project_dir: str) -> list[dict[str, Any]]:
    """Returns facts about the data files that the graph names, with one item for each text that names files.

    An item contains the text, its path in the graph, and the size, time and digest of each file.

    Args:
        graph: the graph.
        project_dir: the folder that relative paths start from.

    Units:
        `size` in bytes, `mtime_ns` in nanoseconds.
    """
    left = _MAX_TOTAL
    known: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for path, text in _possible_paths(graph):
        if text in found:
            continue
        files = _files(text, project_dir)
        for file in files:
            if file not in known:
                known[file] = _file_facts(file, left)
                left -= known[file]["size"] or 0 if known[file]["digest"] else 0
        if files:
            found[text] = {"named": text, "at": format_path(path), "files": {file: known[file] for file in files}}
    return list(found.values())


def changed_data(recorded: list[dict[str, Any]], project_dir: str) -> list[tuple[str, str, str]]:
    """Returns the recorded data that has changed or is gone, each with its name, its former and its current state.

    Args:
        recorded: the result of `data_facts` at the time of the run.
        project_dir: the folder that relative paths start from.
    """
    changes = []
    for item in recorded:
        then, now = item["files"], _files(item["named"], project_dir)
        gone = [file for file in then if file not in now]
        new = [file for file in now if file not in then]
        other = [file for file, fact in then.items() if file in now and not _is_unchanged(fact, file)]
        if gone or new or other:
            kinds = ((other, "changed"), (gone, "gone"), (new, "new"))
            words = [
                f"{len(files)} {word}{_changed_names(files, item['named'], project_dir)}"
                for files, word in kinds
                if files
            ]
            changes.append((item["named"], f"{len(then)} file{'' if len(then) == 1 else 's'}", ", ".join(words)))
    return changes


def _changed_names(files: list[str], named: str, project_dir: str) -> str:
    """Returns the names of files in parentheses; "" if the text in the config names the only file itself."""
    around = os.path.normpath(os.path.join(project_dir, os.path.expanduser(named)))
    if files == [around]:
        return ""
    top = around if os.path.isdir(around) else project_dir
    names = [os.path.relpath(file, top) for file in files[:_NAMED]]
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    return f" ({', '.join(names)}{more})"


def _possible_paths(graph: Graph) -> Iterator[tuple[GraphPath, str]]:
    """Yields every text in the arguments of calls that could name a file, with its path in the graph."""
    calls = {id(node) for path, node in all_nodes(graph) if isinstance(node, Call)}
    tops = [(path, node) for path, node in all_nodes(graph) if id(node) in calls]
    for path, node in walk(tops):
        key = next((step.name for step in reversed(path) if isinstance(step, Key)), None)
        text = node.value if isinstance(node, Scalar) else None
        if (
            isinstance(text, str)
            and 0 < len(text) < 1000
            and "\n" not in text
            and "\0" not in text
            and key not in _WRITTEN
        ):
            yield path, text


def _files(text: str, project_dir: str) -> list[str]:
    """Returns the files that a text names: one file, those in a folder or those that match a pattern; at most 2,000."""
    # A bare word such as `adamw` is not a path, even if a folder of that name exists.
    if os.sep not in text and not os.path.splitext(text)[1]:
        return []
    path = os.path.normpath(os.path.join(project_dir, os.path.expanduser(text)))
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        # A folder that contains the project ("/", "..") is not a folder of data.
        around = os.path.join(project_dir, "").startswith(os.path.join(path, ""))
        found: list[str] = []
        with suppress(TooManyEntriesError):
            found += [] if around else _inside(path)
        return found
    if not glob.has_magic(path):
        return []
    with suppress(TooManyEntriesError):
        return sorted(matching_files(path))[:_MAX_FILES]
    return []


def _inside(folder: str) -> Iterator[str]:
    count = 0
    for here, folders, files in walk_folders(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(files):
            count += 1
            if count > _MAX_FILES:
                return
            yield os.path.join(here, name)


def _file_facts(file: str, left: int) -> dict[str, Any]:
    """Returns size, time and digest of a file.

    The digest is None if the file is too large: larger than a fixed limit, or than the remaining `left` bytes.
    """
    try:
        facts = os.stat(file)
        digest = _digest(file) if facts.st_size < min(_MAX_DIGESTED, left) else None
    except OSError:
        return {"size": None, "mtime_ns": None, "digest": None}
    return {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "digest": digest}


def _is_unchanged(then: dict[str, Any], file: str) -> bool:
    try:
        facts = os.stat(file)
        if then["size"] != facts.st_size:
            return False
        # A file that was too large for a digest is compared by its time.
        return bool(
            then["mtime_ns"] == facts.st_mtime_ns if then["digest"] is None else then["digest"] == _digest(file)
        )
    except OSError:
        return then["size"] is None


def _digest(file: str) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
