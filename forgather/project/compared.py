"""What `diff` compares: a config, a config of a Git revision, or the folder of a past run.

Takes the words of the command line, gives a `Compared`: a graph, and how its places are called. Keeps true: both sides
of one comparison see one instant, so that clocks are no difference; nothing is imported or constructed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from forgather.config.graph import Graph
from forgather.errors import ForgatherError, ProjectError
from forgather.project.configfiles import config_files
from forgather.project.configs import choose_config
from forgather.project.display import Display
from forgather.project.meta import ProjectMeta
from forgather.project.metastore import load_meta
from forgather.project.project import Project
from forgather.project.surroundings import surroundings
from forgather.project.workspace import META_FILE, find_project


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One side of a comparison.

    Args:
        title: how the user would call it.
        graph: what it would build, or has built.
        place: short name of a file of this side.
        project: the config; None for a run whose config is gone.
    """

    title: str
    graph: Graph
    place: Callable[[str], str]
    project: Project | None = None


def open_config(meta: ProjectMeta, config: str, now: datetime) -> Compared:
    """Returns a config of the working tree."""
    environment = surroundings(meta.searchpath, project_dir=meta.project_dir, workspace_root=meta.workspace_root)
    project = Project.placed(meta, config, environment=replace(environment, now=now))
    display = Display(meta.project_dir, meta.workspace_root)
    return Compared(title=config, graph=project.graph, place=display, project=project)


def named_config(word: str, folder: str | None) -> tuple[ProjectMeta, str]:
    """Returns the project and the config that a word means.

    Args:
        word: a config's name, the path of its file, the folder of a project, or "" for the default config.
        folder: the project that names are relative to; None for the nearest above the working folder.

    Raises:
        ProjectError: there is no such config.
    """
    if os.path.isfile(os.path.join(word, META_FILE)) and word:
        meta = load_meta(os.path.abspath(word))
        return meta, choose_config(meta)
    by_path = _config_of_file(word)
    if by_path is not None:
        return by_path
    folder = folder or _project_above(word)
    try:
        meta = load_meta(find_project(folder))
        return meta, choose_config(meta, word or None)
    except ForgatherError as error:
        if os.path.exists(word):
            raise _no_side(word) from error
        raise


def _config_of_file(word: str) -> tuple[ProjectMeta, str] | None:
    """Returns the config whose file is named; the project is the nearest above that has it."""
    if not word.endswith(".yaml") or not os.path.isfile(word):
        return None
    folder = os.path.dirname(os.path.abspath(word))
    while folder != os.path.dirname(folder):
        if os.path.isfile(os.path.join(folder, META_FILE)):
            meta = load_meta(folder)
            for name, file in config_files(meta.searchdir, meta.config_prefix).items():
                if os.path.samefile(file, word):
                    return meta, name
        folder = os.path.dirname(folder)
    return None


def _project_above(word: str) -> str | None:
    """Returns the project that a path of no existing file would be in."""
    if os.sep not in word or os.path.isfile(META_FILE):
        return None
    folder = os.path.dirname(os.path.abspath(word))
    while folder != os.path.dirname(folder):
        if os.path.isfile(os.path.join(folder, META_FILE)):
            return folder
        folder = os.path.dirname(folder)
    return None


def _no_side(word: str) -> ProjectError:
    what = "a folder" if os.path.isdir(word) else "a file"
    return ProjectError(
        f"{word!r} is {what}, but neither a config, a project nor the folder of a run",
        code="FG430",
        hint="name a config (tiny), its file, CONFIG@REVISION, or <output folder>/runs/<run>",
    )
