"""The sides of a comparison for `fgcli diff`, and their differences.

The input is a word of the command line (a config, its file or its project); the output is a `Compared`: a graph, and a
function that shortens the names of its files. `compare` returns the differences of two sides. Both sides are rendered
with the same time, so that templates that print the time make no difference. Nothing is imported or constructed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from forgather.cache_file import Digests
from forgather.config.graph import Call, Graph, Node
from forgather.config.insight.change import Change, Difference, Side
from forgather.config.insight.diff import diff
from forgather.config.traverse import all_nodes
from forgather.errors import Diagnostic, ForgatherError, ProjectError
from forgather.project.configs import choose_config, config_files
from forgather.project.defaults import Defaults, changed_defaults
from forgather.project.metadata import ProjectMeta
from forgather.project.metadata_cache import load_meta
from forgather.project.path_display import Display
from forgather.project.project import Project
from forgather.project.template_environment import project_environment
from forgather.project.workspace import META_FILE, find_project, project_above


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One side of a comparison.

    Args:
        title: the name that a user would use for this side.
        graph: the graph that the config would build, or that the past run has built.
        place: the function that returns the short name of a file of this side.
        config: the name of the config.
        code: the digest of each Python file that a constructor of the graph names, by the name in the constructor.
        defaults: the default arguments of the constructors; empty if they are unknown or are not to be compared.
        notes: the findings about this side.
        declared: a graph that declares the options of the config; None if it is unknown.
    """

    title: str
    graph: Graph
    place: Callable[[str], str]
    config: str
    code: Mapping[str, str] = field(default_factory=dict)
    defaults: Defaults = field(default_factory=dict)
    notes: tuple[Diagnostic, ...] = ()
    declared: Graph | None = None


def compare(old: Compared, new: Compared) -> tuple[Difference, ...]:
    """Returns the differences of two sides: those of the graphs, then changed Python files and defaults.

    Args:
        old: the first side.
        new: the second side.
    """
    found = [*diff(old.graph, new.graph), *_changed_code(old, new)]
    if old.defaults and new.defaults:
        found += changed_defaults(old.graph, new.graph, old.defaults, new.defaults)
    return tuple(found)


def code_digests(graph: Graph, project_dir: str) -> dict[str, str]:
    """Returns the digest, by file name, of each Python file of the project that a constructor of the graph names.

    Args:
        graph: the graph.
        project_dir: the folder that the names of files are relative to.
    """
    digest, found = Digests(), {}
    for _, node in all_nodes(graph):
        file = _file_of(node)
        if file.endswith(".py") and file not in found:
            known = digest(os.path.normpath(os.path.join(project_dir, file)))
            if known is not None:
                found[file] = known
    return found


def _changed_code(old: Compared, new: Compared) -> Iterator[Difference]:
    changed = {file for file, digest in new.code.items() if old.code.get(file, digest) != digest}
    # Reversed, so that the first call of each file remains.
    first = {_file_of(node): (path, node) for path, node in reversed(all_nodes(old.graph))}
    for path, node in all_nodes(new.graph):
        file = _file_of(node)
        if file in changed and file in first:
            changed.discard(file)
            before, earlier = first[file]
            sides = Side(file, earlier.origin, before, earlier), Side("has changed", node.origin, path, node)
            yield Difference(Change.CODE, *sides)


def _file_of(node: Node) -> str:
    return node.constructor.partition(":")[0] if isinstance(node, Call) else ""


def open_config(meta: ProjectMeta, config: str, now: datetime) -> Compared:
    """Returns a config of the working tree as a side of a comparison.

    Args:
        meta: the project.
        config: the name of the config.
        now: the time that clock functions return.
    """
    project = Project.in_environment(meta, config, environment=replace(project_environment(meta), now=now))
    display = Display(meta.project_dir, meta.workspace_root)
    graph = project.graph
    code = code_digests(graph, meta.project_dir)
    return Compared(title=config, graph=graph, place=display, config=config, code=code, declared=graph)


def named_config(word: str, folder: str | None) -> tuple[ProjectMeta, str]:
    """Returns the project and the config that a word of the command line names.

    Args:
        word: the name of a config, the path of its file, the folder of a project, or "" for the default config.
        folder: the project that names are relative to; None for the nearest project above the working folder.

    Raises:
        ProjectError: FG405 or FG430 if there is no such config; FG400 or FG401 if there is no such project.
    """
    if os.path.isfile(os.path.join(word, META_FILE)) and word:
        meta = load_meta(os.path.abspath(word))
        return meta, choose_config(meta)
    by_path = _config_of_file(word)
    if by_path is not None:
        return by_path
    folder = folder or project_of_path(word)
    try:
        meta = load_meta(find_project(folder))
        return meta, choose_config(meta, word or None)
    except ForgatherError as error:
        if os.path.isfile(word):
            raise _no_side(word) from error
        raise


def _config_of_file(word: str) -> tuple[ProjectMeta, str] | None:
    """Returns the project and the config of a file; None if the file is not a config.

    The project is the nearest folder above the file that has this config.
    """
    if not word.endswith(".yaml") or not os.path.isfile(word):
        return None
    folder = os.path.dirname(os.path.abspath(word))
    while folder != os.path.dirname(folder):
        if os.path.isfile(os.path.join(folder, META_FILE)):
            meta = load_meta(folder)
            for name, file in config_files(meta.searchdir, meta.config_prefix).items():
                # One file can have several paths through symbolic links.
                if os.path.samefile(file, word):
                    return meta, name
        folder = os.path.dirname(folder)
    return None


def project_of_path(word: str) -> str | None:
    """Returns the project that contains a path; None if the word is not a path, or the path is in no project.

    The path need not exist. If the working folder is a project, the result is None, because that project is used.
    """
    if os.sep not in word or os.path.isfile(META_FILE):
        return None
    return project_above(os.path.dirname(word))


def _no_side(word: str) -> ProjectError:
    return ProjectError(
        f"{word!r} is a file, but not a config",
        code="FG430",
        hint="name a config (tiny), its file, CONFIG@REVISION, or <output folder>/runs/<run>",
    )
