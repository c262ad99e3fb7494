"""Which folders a project may take templates from without its user's word.

Kept apart from `metadata_file`, which loads the stages: a cached `meta.yaml` is checked against this alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from forgather.project.locations import config_dir
from forgather.project.trust import current_trust


def is_allowed_root(folder: str, project_dir: str, around: tuple[str | None, ...]) -> bool:
    """Returns whether templates of a folder may be loaded for a project.

    Args:
        folder: absolute folder.
        project_dir: absolute folder of the project.
        around: further folders whose templates belong to the project: workspace and library.
    """
    real = os.path.realpath(folder)
    if any(_is_in(real, os.path.realpath(root)) for root in _roots(project_dir, around)):
        return True
    return current_trust().has_folder(real)


def _roots(project_dir: str, around: tuple[str | None, ...]) -> Iterator[str]:
    yield project_dir
    yield from (folder for folder in around if folder is not None)
    yield os.path.join(config_dir(), "templates")
    repository = _own_repository(project_dir)
    if repository is not None:
        yield repository


def _own_repository(folder: str) -> str | None:
    """Returns the nearest Git repository at or above a folder, if it belongs to this user."""
    current = os.path.realpath(folder)
    while not os.path.lexists(os.path.join(current, ".git")):
        if current == os.path.dirname(current):
            return None
        current = os.path.dirname(current)
    # A shared folder may contain another user's repository around the project.
    is_own = not hasattr(os, "geteuid") or os.stat(current).st_uid == os.geteuid()
    return current if is_own else None


def _is_in(path: str, folder: str) -> bool:
    return os.path.join(path, "").startswith(os.path.join(folder, ""))
