"""What a project says about itself, kept between commands.

Takes a project folder, gives `ProjectMeta`. Keeps true: a project that was read before and has not changed is not
rendered again, and costs no import of the stages.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from forgather.errors import Diagnostic
from forgather.project.kept import Dependencies, Digests, holds, keep_entry, read_entry, restore_dependencies
from forgather.source import Span

_PART = "projects"
_TUPLES = ("searchdir", "system_path", "searchpath", "files", "diagnostics")


@dataclass(frozen=True, kw_only=True)
class ProjectMeta:
    """Facts of one project.

    Args:
        project_dir: absolute folder.
        workspace_root: absolute folder of the workspace; None outside any.
        name: the folder's name where meta.yaml gives none.
        description: one line, "" where there is none.
        searchdir: absolute folders that hold the project's own templates and configs; all exist.
        config_prefix: folder of the configs inside each search folder.
        default_config: config that is meant when none is named.
        default_config_span: where meta.yaml names it.
        system_path: absolute folders that constructors may be imported from.
        searchpath: `searchdir`, then the workspace's shared templates, then the packaged library.
        diagnostics: warnings about the project.
        files: absolute paths of meta.yaml and the templates it came from.
        env_reads: environment variables that they read, with the value they got.
        dependencies: None where these facts must not be kept.
    """

    project_dir: str
    workspace_root: str | None
    name: str
    description: str
    searchdir: tuple[str, ...]
    config_prefix: str
    default_config: str | None
    default_config_span: Span | None
    system_path: tuple[str, ...]
    searchpath: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]
    files: tuple[str, ...]
    env_reads: dict[str, str]
    dependencies: Dependencies | None


def load_meta(project_dir: str) -> ProjectMeta:
    """Returns what the `meta.yaml` of a project says.

    Args:
        project_dir: absolute folder that holds `meta.yaml`.

    Raises:
        ForgatherError: `meta.yaml` cannot be rendered or read, or says something that it cannot say.
    """
    facts = read_entry(_PART, project_dir)
    kept = _restore(facts) if facts is not None else None
    if kept is not None and kept.project_dir == project_dir and holds(kept.dependencies, Digests()):
        if all(os.path.isdir(folder) for folder in kept.searchdir):
            return kept
    # The stages are loaded for what is not known yet, and for nothing else.
    from forgather.project.metafile import read_meta

    meta = read_meta(project_dir)
    if meta.dependencies is not None:
        keep_entry(_PART, project_dir, asdict(meta))
    return meta


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
