"""What a project says about itself.

Takes nothing; `metafile` reads it from a meta.yaml, `metastore` keeps it between commands.
"""

from __future__ import annotations

from dataclasses import dataclass

from forgather.errors import Diagnostic
from forgather.project.fact_cache import Dependencies
from forgather.source import Span


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
