"""The cache of project facts on disk.

The input is a project folder; the output is `ProjectMeta`. For a project that has not changed, meta.yaml is not
rendered again, and the modules that render and load it are not imported.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from forgather.cache_file import Digests
from forgather.project.fact_cache import is_current, read_entry, restore_dependencies, write_entry
from forgather.project.locations import library_dir
from forgather.project.metadata import ProjectMeta
from forgather.project.trust import is_allowed_root
from forgather.source import Span

_PART = "projects"
_TUPLES = ("searchdir", "system_path", "searchpath", "files", "diagnostics")


def load_meta(project_dir: str) -> ProjectMeta:
    """Returns the facts of a project, from the cache if they are unchanged.

    Args:
        project_dir: the absolute folder that contains `meta.yaml`.

    Raises:
        ForgatherError: if `meta.yaml` cannot be rendered or read, or contains a wrong setting.
    """
    facts = read_entry(_PART, project_dir)
    kept = _restore(facts) if facts is not None else None
    if kept is not None and kept.project_dir == project_dir and is_current(kept.dependencies, Digests()):
        # The digests of files do not show that a folder was removed.
        if all(os.path.isdir(folder) for folder in (*kept.searchdir, *kept.system_path)) and _is_allowed(kept):
            return kept
    # The stages are imported only for a project that is not in the cache.
    from forgather.project.metadata_file import read_meta

    meta = read_meta(project_dir)
    if meta.dependencies is not None:
        write_entry(_PART, project_dir, asdict(meta))
    return meta


def _is_allowed(meta: ProjectMeta) -> bool:
    """Returns whether the search folders are still allowed: the user may have removed one from the trusted folders."""
    around = (meta.workspace_root, library_dir())
    return all(is_allowed_root(folder, meta.project_dir, around) for folder in meta.searchdir)


def _restore(facts: dict[str, Any]) -> ProjectMeta | None:
    try:
        span = facts["default_config_span"]
        changes = {name: tuple(facts[name]) for name in _TUPLES} | {
            "default_config_span": Span(**span) if span else None,
            "dependencies": restore_dependencies(facts["dependencies"]),
        }
        return ProjectMeta(**{**facts, **changes})
    except (TypeError, ValueError, KeyError):
        return None
