"""`ProjectMeta`: the facts of a project from its meta.yaml.

`metadata_file` reads them, and `metadata_cache` stores them on disk.
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
        project_dir: the absolute folder of the project.
        workspace_root: the absolute folder of the workspace; None if the project is in no workspace.
        name: the name of the project; the name of its folder if meta.yaml contains none.
        description: the description of the project, one line, or "".
        searchdir: the absolute folders of the project's own templates and configs; all of them exist.
        config_prefix: the folder of the configs inside each search folder.
        default_config: the config that is used if none is named; None if there is no default.
        default_config_span: the location of the default config's name in meta.yaml.
        system_path: the absolute folders from which constructors may be imported.
        searchpath: the folders of templates: `searchdir`, the workspace's templates, then the packaged library.
        diagnostics: the warnings about the project.
        files: the absolute paths of meta.yaml and of the templates that it uses.
        env_reads: the environment variables that these files read, with their values.
        dependencies: what these facts depend on; None if they must not be stored in the cache.
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
