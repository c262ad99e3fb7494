"""Listings made anew: renders and loads what the cache does not know.

Takes a project folder, gives a `ProjectListing`. Keeps true: constructs nothing, and a broken config is described
by its reason and never stops the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from forgather.config.rendered import RenderedText
from forgather.errors import Diagnostic, ForgatherError, Severity
from forgather.project.display import Display
from forgather.project.listing import ConfigListing, Dependencies, ProjectListing, file_digest
from forgather.project.meta import ProjectMeta, load_meta
from forgather.project.project import Project
from forgather.project.targets import run_meta
from forgather.project.workspace import WORKSPACE_FOLDER

# A template that looks for one of several names may change its mind when a file appears that was never asked for.
_LOOKS_AROUND = re.compile(r"ignore\s+missing|\b(?:include|extends|import|from)\s*[\[(]")


def describe_project(project_dir: str, display: Display) -> ProjectListing:
    """Returns the listing of a project without its configs."""
    try:
        meta = load_meta(project_dir)
    except ForgatherError as error:
        return ProjectListing(project_dir=project_dir, name=os.path.basename(project_dir), error=reason(error, display))
    warnings = [_line(found, display) for found in meta.diagnostics if found.severity is not Severity.LINT]
    made_from = _made_from(meta.rendered, meta.meta_searchpath)
    if made_from is not None:
        made_from = replace(made_from, absent=(*made_from.absent, *_nearer_workspaces(meta)))
    return ProjectListing(
        project_dir=project_dir,
        name=meta.name,
        description=" ".join(meta.description.split()),
        default_config=meta.default_config,
        searchdir=meta.searchdir,
        config_prefix=meta.config_prefix,
        warnings=tuple(warnings),
        dependencies=None if warnings or not meta.searchdir else made_from,
    )


def describe_config(project_dir: str, name: str, display: Display) -> ConfigListing:
    """Returns the listing of one config."""
    try:
        project = Project(name, project_dir)
        facts = run_meta(project.graph)
        errors = [found for found in project.diagnostics if found.severity is Severity.ERROR]
    except ForgatherError as error:
        return ConfigListing(name=name, error=reason(error, display))
    return ConfigListing(
        name=name,
        title=facts.name,
        description=facts.description,
        config_class=facts.config_class,
        error=_line(errors[0], display) if errors else None,
        dependencies=_made_from(project.rendered, project.meta.searchpath),
    )


def reason(error: ForgatherError, display: Display) -> str:
    """Returns the one line that says why a config is broken."""
    return _line(error.diagnostic, display)


def _line(found: Diagnostic, display: Display) -> str:
    place = f"  ({display(found.span.file)}:{found.span.line})" if found.span else ""
    message = found.message.split("\n")[0]
    return f"{found.severity}[{found.code}]: {message[:200]}{place}"


def _made_from(rendered: RenderedText, searchpath: tuple[str, ...]) -> Dependencies | None:
    if any(_LOOKS_AROUND.search(source.text) for source in rendered.sources.values()):
        return None
    files = _digests(rendered.sources)
    if files is None:
        return None
    env = {name: os.environ.get(name) for name in rendered.env_reads}
    return Dependencies(files=files, absent=_absent(rendered, searchpath), env=env)


def _digests(sources: Mapping[str, object]) -> dict[str, str] | None:
    found = {file: file_digest(file) for file in sources if os.path.isabs(file)}
    sound = {file: value for file, value in found.items() if value is not None}
    return sound if len(sound) == len(found) else None


def _absent(rendered: RenderedText, searchpath: tuple[str, ...]) -> tuple[str, ...]:
    absent: list[str] = []
    for use in rendered.templates:
        for folder in searchpath:
            candidate = os.path.join(folder, use.name)
            if candidate == use.file:
                break
            if not os.path.lexists(candidate):
                absent.append(candidate)
    return tuple(dict.fromkeys(absent))


def _nearer_workspaces(meta: ProjectMeta) -> list[str]:
    nearer: list[str] = []
    folder = meta.project_dir
    while folder != meta.workspace_root:
        nearer.append(os.path.join(folder, WORKSPACE_FOLDER))
        if folder == os.path.dirname(folder):
            break
        folder = os.path.dirname(folder)
    return nearer
