"""Reads the meta.yaml of a project, and decides which folders the project may use templates from.

The input is a project folder; the output is `ProjectMeta`. Templates may be in the project, its workspace, the template
library, the user's own template folder, the user's Git repository that contains the project, and folders that the user
trusts. Symbolic links are resolved before the check. A config cannot extend this list.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from forgather.bounded import read_bytes
from forgather.config.environment import ConfigEnvironment
from forgather.config.graph import Entry, Graph, Sequence
from forgather.config.load import load
from forgather.config.render import render
from forgather.config.rendered import RenderedText
from forgather.errors import Diagnostic, ProjectError, Severity, nearest
from forgather.process_limits import limits_while_reading
from forgather.project.fact_cache import Dependencies, dependencies_of
from forgather.project.literal import plain_value
from forgather.project.locations import config_dir, library_dir
from forgather.project.metadata import ProjectMeta
from forgather.project.template_environment import template_environment
from forgather.project.trust import is_allowed_root
from forgather.project.workspace import META_FILE, WORKSPACE_FOLDER, find_workspace
from forgather.source import SourceFile, SourceMap, Span

_MAX_BLANK = 100_000
KEYS = ("name", "description", "searchdir", "config_prefix", "default_config", "system_path")
# The values of these names change although no file does, so a text that uses them cannot be cached.
_MOVING = re.compile(r"\b(?:\w*time|now|utcnow|getcwd|abspath|relpath|versions|(?:user|site|forgather)_\w+)\b")


@dataclass(frozen=True, kw_only=True)
class Neighbors:
    """The surroundings of a project that is not at its usual location, such as a project at a Git revision.

    Args:
        workspace: the absolute folder of the project's workspace; None if the project is in no workspace.
        library: the absolute folder of the template library.
        repository: a further absolute folder that may contain templates of the project; None if there is none.
        is_folder: the function that returns whether a search folder exists.
    """

    workspace: str | None
    library: str
    repository: str | None = None
    is_folder: Callable[[str], bool] = os.path.isdir


def read_meta(project_dir: str, neighbors: Neighbors | None = None) -> ProjectMeta:
    """Returns the facts of a project, read from its `meta.yaml` without the cache.

    Args:
        project_dir: the absolute folder of the project.
        neighbors: the surroundings of the project; None to look them up in the file system.

    Raises:
        ProjectError: FG402 if a key is unknown; FG403 if a value has a wrong type; FG407 or FG444 if a folder is
            outside the allowed folders.
        ForgatherError: if `meta.yaml` cannot be rendered or loaded.
    """
    around = neighbors or Neighbors(workspace=find_workspace(project_dir), library=library_dir())
    workspace = around.workspace
    shared = [os.path.join(workspace, WORKSPACE_FOLDER)] if workspace else []
    candidates = (project_dir, *shared, os.path.join(config_dir(), "templates"), around.library)
    path = tuple(folder for folder in candidates if os.path.isdir(folder))
    with limits_while_reading(META_FILE, lambda: os.path.join(project_dir, META_FILE)):
        rendered = _render(project_dir, template_environment(path, project_dir=project_dir, workspace_root=workspace))
        graph = load(rendered) if rendered.text.strip() else Graph(targets={})
    _refuse_unknown_keys(graph)
    entries = graph.targets
    searchdir, warnings = _search_folders(entries.get("searchdir"), project_dir, around.is_folder)
    _refuse_foreign_roots(entries.get("searchdir"), (*searchdir, *shared), project_dir, around)
    system_path = _folders(entries.get("system_path"), project_dir)
    missing = [item for item in system_path if not around.is_folder(item[1])]
    warnings += [_missing_folder("folder", "system_path", *item) for item in missing]
    default = entries.get("default_config")
    meta = ProjectMeta(
        project_dir=project_dir,
        workspace_root=workspace,
        name=_text_value(entries.get("name")) or os.path.basename(project_dir),
        description=_text_value(entries.get("description")) or "",
        searchdir=searchdir,
        config_prefix=_prefix(entries.get("config_prefix")),
        default_config=_text_value(default),
        default_config_span=default.value.span if default else None,
        system_path=tuple(folder for _, folder, _ in system_path),
        searchpath=tuple(dict.fromkeys([*searchdir, *shared, around.library])),
        diagnostics=(*rendered.diagnostics, *graph.diagnostics, *warnings),
        files=tuple(rendered.sources),
        env_reads=dict(rendered.env_reads),
        dependencies=None,
    )
    return replace(meta, dependencies=_dependencies(meta, rendered, candidates))


def _dependencies(meta: ProjectMeta, rendered: RenderedText, searchpath: tuple[str, ...]) -> Dependencies | None:
    # The cache does not store diagnostics, so a project that has any is read again each time.
    if meta.diagnostics or any(_MOVING.search(source.text) for source in rendered.sources.values()):
        return None
    found = dependencies_of(rendered, searchpath)
    if found is None:
        return None
    # A workspace that appears closer to the project would take precedence over the present one.
    appearing = _nearer_workspaces(meta)
    if not meta.searchdir:
        # The default search folder is used as soon as it exists.
        appearing.append(os.path.join(meta.project_dir, "templates"))
    return replace(found, absent=(*found.absent, *appearing))


def _nearer_workspaces(meta: ProjectMeta) -> list[str]:
    nearer: list[str] = []
    folder = meta.project_dir
    while folder != meta.workspace_root:
        nearer.append(os.path.join(folder, WORKSPACE_FOLDER))
        if folder == os.path.dirname(folder):
            break
        folder = os.path.dirname(folder)
    return nearer


def _render(project_dir: str, environment: ConfigEnvironment) -> RenderedText:
    file = os.path.join(project_dir, META_FILE)
    # An empty meta.yaml is a project with all defaults, while an empty config would be an error.
    if os.path.getsize(file) <= _MAX_BLANK and not read_bytes(file, _MAX_BLANK).strip():
        sources = {file: SourceFile(file, "")}
        return RenderedText(name=META_FILE, file=file, text="", source_map=SourceMap("", (), ()), sources=sources)
    return render(environment, META_FILE)


def _refuse_unknown_keys(graph: Graph) -> None:
    unknown = [entry for name, entry in graph.targets.items() if name not in KEYS]
    if unknown:
        first, *rest = [_unknown_key(entry) for entry in unknown]
        raise ProjectError(first.message, code=first.code, span=first.span, hint=first.hint, others=rest)


def _unknown_key(entry: Entry) -> Diagnostic:
    return Diagnostic(
        code="FG402",
        message=f"{META_FILE} has no key {entry.key!r}",
        span=entry.span,
        hint=nearest(str(entry.key), KEYS),
    )


def _search_folders(
    entry: Entry | None, project_dir: str, is_folder: Callable[[str], bool]
) -> tuple[tuple[str, ...], list[Diagnostic]]:
    if entry is None:
        default = os.path.join(project_dir, "templates")
        return ((default,) if is_folder(default) else ()), []
    folders: list[str] = []
    warnings: list[Diagnostic] = []
    for item, folder, span in _folders(entry, project_dir):
        if is_folder(folder):
            folders.append(folder)
        else:
            warnings.append(_missing_folder("search folder", "searchdir", item, folder, span))
    return tuple(dict.fromkeys(folders)), warnings


def _refuse_foreign_roots(entry: Entry | None, folders: tuple[str, ...], project_dir: str, around: Neighbors) -> None:
    own = (around.workspace, around.library, around.repository)
    places = {folder: (item, span) for item, folder, span in _folders(entry, project_dir)}
    for folder in folders:
        if not is_allowed_root(folder, project_dir, own):
            item, span = places.get(folder, (os.path.relpath(folder, project_dir), None))
            real = os.path.realpath(folder)
            way = f"fgcli trust {shlex.quote(real)}"
            raise ProjectError(
                f"search folder {item!r} leads out of the project, to {real!r}",
                code="FG444",
                span=span,
                hint=f"copy what you need into the project; or, where you trust that folder: {way}",
            )


def _folders(entry: Entry | None, project_dir: str) -> list[tuple[str, str, Span | None]]:
    """Returns the folders of a key in meta.yaml, each as it is written, as an absolute path, and with its location."""
    if entry is None:
        return []
    nodes = entry.value.items if isinstance(entry.value, Sequence) else [entry.value]
    places = zip(_folder_values(entry), nodes, strict=False)
    return [(item, os.path.normpath(os.path.join(project_dir, item)), node.span) for item, node in places]


def _missing_folder(kind: str, key: str, item: str, folder: str, span: Span | None) -> Diagnostic:
    return Diagnostic(
        code="FG404",
        message=f"{kind} {item!r} does not exist",
        severity=Severity.WARNING,
        span=span,
        hint=f"make {folder!r}, or remove it from {key!r}",
    )


def _prefix(entry: Entry | None) -> str:
    prefix = _text_value(entry)
    if prefix is None:
        return "configs"
    clean = os.path.normpath(prefix).replace(os.sep, "/")
    if os.path.isabs(prefix) or clean.split("/")[0] == "..":
        raise ProjectError(
            f"'config_prefix' {prefix!r} leads out of the search folders",
            code="FG407",
            span=entry.value.span if entry else None,
            hint="name a folder inside the search folders, as in 'configs'",
        )
    return "" if clean == "." else clean


def _text_value(entry: Entry | None) -> str | None:
    value = _plain_entry(entry)
    if value is None or isinstance(value, str):
        return value
    raise _wrong_type(entry, "a text", value)


def _folder_values(entry: Entry | None) -> list[str]:
    value = _plain_entry(entry)
    if value is None:
        return []
    items = value if isinstance(value, list) else [value]
    folders = [item for item in items if isinstance(item, str)]
    if len(folders) == len(items):
        return folders
    raise _wrong_type(entry, "a folder or a list of folders", value)


def _plain_entry(entry: Entry | None) -> object:
    return None if entry is None else plain_value(entry.value, f"{str(entry.key)!r} in {META_FILE}")


def _wrong_type(entry: Entry | None, expected: str, value: object) -> ProjectError:
    key, span = (str(entry.key), entry.value.span) if entry else ("", None)
    return ProjectError(
        f"{key!r} in {META_FILE} is {repr(value)[:80]}, and must be {expected}",
        code="FG403",
        span=span,
        hint=f"write {key}: followed by {expected}",
        expected=expected,
        found=value,
    )
