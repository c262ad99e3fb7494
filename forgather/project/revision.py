"""A config as it was at a Git revision.

Takes a config's name or the path of its file, and a revision, gives a `Compared`. Keeps true: the templates are those
of the revision, of the library too where that lies in the same repository; variables are those of the working tree,
so that equal configs of two revisions are equal graphs; errors speak of files at the revision.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

from forgather.errors import ForgatherError, ProjectError
from forgather.project.comparison import Compared, code_digests
from forgather.project.configs import choose_config, config_files
from forgather.project.git_repository import Tree, open_tree
from forgather.project.locations import library_dir
from forgather.project.metadata import ProjectMeta
from forgather.project.metadata_file import Neighbors, read_meta
from forgather.project.path_display import Display
from forgather.project.project import Project
from forgather.project.template_environment import surroundings
from forgather.project.workspace import META_FILE, WORKSPACE_FOLDER, find_project, find_workspace
from forgather.source import Span

_LAST = "HEAD"


def open_revision(word: str, revision: str, folder: str | None, now: datetime) -> Compared:
    """Returns a config as it was at a revision.

    Args:
        word: a config's name, the path of its file, the folder of a project, or "" for the default config.
        revision: what Git calls a revision.
        folder: the project that names are relative to; None for the nearest above the working folder.
        now: the instant that clock functions see.

    Raises:
        ForgatherError: there is no such revision or config, or the config is broken there.
    """
    is_path = os.sep in word or word.endswith(".yaml") and os.path.isfile(word) or os.path.isdir(word)
    start = os.path.realpath(word) if word and is_path else os.path.realpath(find_project(folder))
    with open_tree(start, revision) as tree, _told(tree):
        project_dir = _project_in(tree, start, word)
        meta = _meta(tree, project_dir)
        config = _config(tree, meta, start, word if not is_path else None)
        workspace = tree.real(meta.workspace_root) if meta.workspace_root else None
        environment = surroundings(meta.searchpath, project_dir=project_dir, workspace_root=workspace)
        project = Project.placed(meta, config, environment=replace(environment, now=now))
        display = Display(project_dir, workspace)
        return Compared(
            title=f"{config}@{revision}",
            graph=project.graph,
            place=lambda file: display(tree.real(file)),
            config=config,
            code=code_digests(project.graph, meta.project_dir),
            declared=project.graph,
        )


def _project_in(tree: Tree, start: str, word: str) -> str:
    """Returns the project, as a folder of the working tree, that a name or path means at the revision."""
    folder = start
    while folder.startswith(tree.top):
        if tree.has(os.path.join(folder, META_FILE)):
            return folder
        if os.path.isfile(os.path.join(folder, META_FILE)):
            if tree.revision == _LAST:
                raise _not_committed(tree, folder)
            break
        folder = os.path.dirname(folder)
    raise ProjectError(
        f"{word or os.path.relpath(start, tree.top)!r} is in no project at {tree.revision}",
        code="FG436",
        hint=f"no {META_FILE!r} there at that revision; 'git log -- DIR' tells when it came",
    )


def _not_committed(tree: Tree, project_dir: str) -> ProjectError:
    file = os.path.relpath(os.path.join(project_dir, META_FILE), tree.top)
    return ProjectError(
        f"the project is not in Git yet: the last commit has no {file!r}",
        code="FG436",
        hint="commit it, or compare two configs or runs: fgcli diff A B",
    )


def _meta(tree: Tree, project_dir: str) -> ProjectMeta:
    workspace: str | None = project_dir
    while workspace is not None and not tree.is_folder(os.path.join(tree.laid(workspace), WORKSPACE_FOLDER)):
        workspace = None if workspace == tree.top else os.path.dirname(workspace)
    neighbors = Neighbors(
        workspace=tree.laid(workspace) if workspace else find_workspace(os.path.dirname(tree.top)),
        library=_library(tree),
        repository=tree.laid(tree.top),
        is_folder=tree.is_folder,
    )
    laid = tree.laid(project_dir)
    tree.is_folder(laid)
    return read_meta(laid, neighbors)


def _library(tree: Tree) -> str:
    """The library of the revision where it is a part of the repository, else the installed one."""
    laid = tree.laid(os.path.realpath(library_dir()))
    return laid if tree.is_folder(laid) else library_dir()


def _config(tree: Tree, meta: ProjectMeta, start: str, name: str | None) -> str:
    if start == tree.real(meta.project_dir) or name is not None:
        return choose_config(meta, name or None)
    for config, file in config_files(meta.searchdir, meta.config_prefix).items():
        if tree.real(file) == start:
            return config
    raise ProjectError(
        f"{os.path.relpath(start, tree.top)!r} is no config of project {meta.name!r} at {tree.revision}",
        code="FG436",
        hint="configs there: " + ", ".join(list(config_files(meta.searchdir, meta.config_prefix))[:9]),
    )


@contextmanager
def _told(tree: Tree) -> Iterator[None]:
    """Gives errors places that name the revision: the file of the working tree may hold another text."""
    try:
        yield
    except ForgatherError as error:
        error.message = error.message.replace(tree.folder, tree.top)
        error.hint = error.hint and error.hint.replace(tree.folder, tree.top)
        context = [part.replace(tree.folder, tree.top) for part in error.context]
        error.context = tuple(context if error.code == "FG436" else [*context, f"at revision {tree.revision}"])
        if error.span is not None and error.span.file.startswith(tree.folder):
            file = os.path.relpath(error.span.file, tree.folder)
            error.span = Span(f"{file}@{tree.revision}", error.span.line, error.span.column)
        error.others = ()
        raise
