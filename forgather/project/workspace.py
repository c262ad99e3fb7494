"""Finds projects and workspaces in the file system.

The input is folders; the output is absolute folders. The search goes upward (or downward for `find_projects`), and no
file is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from forgather.errors import ProjectError

META_FILE = "meta.yaml"
WORKSPACE_FOLDER = "forgather_workspace"
# Large folders without projects. The folder of a run has a copy of its project's meta.yaml, which is not a project.
_SKIPPED = frozenset({"node_modules", "__pycache__", "build", "dist", "output_models", "runs", "venv"})


def find_project(folder: str | None = None) -> str:
    """Returns the folder of a project: the named one, or the nearest one at or above the working folder.

    Args:
        folder: the value of `-p`; None to search upward from the working folder.

    Raises:
        ProjectError: FG400 if no folder above contains a project; FG401 if the named folder is not a project.
    """
    if folder is not None:
        return _named_project(folder)
    found = _upward(os.getcwd(), META_FILE)
    if found is None:
        raise ProjectError(
            f"no {META_FILE!r} in {os.getcwd()!r} or any folder above it",
            code="FG400",
            hint="name a project with -p DIR, list projects with 'fgcli ls -r', or make one with 'fgcli new project'",
        )
    return found


def project_above(folder: str) -> str | None:
    """Returns the nearest project at or above a folder; None if there is none."""
    return _upward(folder or os.curdir, META_FILE)


def find_workspace(project_dir: str) -> str | None:
    """Returns the nearest folder at or above the project with a `forgather_workspace/` in it; None if there is none."""
    return _upward(project_dir, WORKSPACE_FOLDER)


def find_projects(folder: str) -> Iterator[str]:
    """Yields the folder of every project at or below `folder`, sorted by path; symbolic links are not followed."""
    for here, folders, files in os.walk(folder):
        # Changed in place: os.walk descends into what remains.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        if META_FILE in files:
            yield os.path.abspath(here)


def _named_project(folder: str) -> str:
    if not folder:
        raise ProjectError("-p names no folder: it is empty", code="FG401", hint="leave -p out, or write -p .")
    path = os.path.abspath(folder)
    folder = folder.rstrip(os.sep) or folder
    if os.path.isfile(os.path.join(path, META_FILE)):
        return path
    if not os.path.isdir(path):
        problem = "no such folder" if not os.path.exists(path) else "it is not a folder"
        raise ProjectError(f"no project {folder!r}: {problem}", code="FG401", hint=_near_projects(path))
    raise ProjectError(f"{folder!r} is not a project: it has no {META_FILE!r}", code="FG401", hint=_near_projects(path))


def _near_projects(path: str) -> str:
    parent = path if os.path.isdir(path) else os.path.dirname(path)
    found = []
    if os.path.isdir(parent):
        with os.scandir(parent) as entries:
            found = sorted(entry.name for entry in entries if os.path.isfile(os.path.join(entry.path, META_FILE)))
    if found:
        return "projects there: " + ", ".join(found[:9])
    return "'fgcli ls -r DIR' lists the projects below a folder, 'fgcli new project NAME' makes one"


def _upward(folder: str, name: str) -> str | None:
    current = os.path.abspath(folder)
    while True:
        if os.path.exists(os.path.join(current, name)):
            return current
        parent = os.path.dirname(current)
        if parent == current:
            return None
        current = parent
