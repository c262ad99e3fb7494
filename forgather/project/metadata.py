"""`ProjectMeta`: the facts of a project from its meta.yaml.

`metadata_file` reads them, and `metadata_cache` stores them between commands.
"""

from __future__ import annotations

from dataclasses import dataclass

from forgather.errors import Diagnostic
from forgather.project.fact_cache import Dependencies
from forgather.source import Span


@dataclass(frozen=True, kw_only=True)
class ProjectMeta:
    """The facts of one project.

    Args:
        project_dir: absolute folder.
        workspace_root: absolute folder of the workspace; None outside any.
        name: the project's name; the folder's name if meta.yaml gives none.
        description: one line, or "".
        searchdir: absolute folders of the project's own templates and configs; all exist.
        config_prefix: folder of the configs inside each search folder.
        default_config: the config that is used if none is named.
        default_config_span: the place of its name in meta.yaml.
        system_path: absolute folders that constructors may be imported from.
        searchpath: `searchdir`, then the workspace's templates, then the packaged library.
        diagnostics: warnings about the project.
        files: absolute paths of meta.yaml and of the templates that it uses.
        env_reads: environment variables that these read, with their values.
        dependencies: what these facts were made from; None if they must not be stored.
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
