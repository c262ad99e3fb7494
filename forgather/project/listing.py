"""Listings of projects and configs that are not in the cache of listings.

The input is a project folder; the output is `ProjectListing` and `ConfigListing`. Configs are rendered and loaded, but
nothing is constructed. A broken config is listed with its error and does not affect the others.
"""

from __future__ import annotations

import os

from forgather.errors import Diagnostic, ForgatherError, Severity
from forgather.project.dynamic_args import read_options
from forgather.project.fact_cache import dependencies_of
from forgather.project.listing_cache import ConfigListing, ProjectListing
from forgather.project.metadata_cache import load_meta
from forgather.project.path_display import Display
from forgather.project.project import Project
from forgather.project.targets import run_meta, trainer_output_dir


def describe_project(project_dir: str, display: Display) -> ProjectListing:
    """Returns the listing of a project without its configs.

    Args:
        project_dir: the absolute folder of the project.
        display: the object that shortens paths in messages.
    """
    try:
        meta = load_meta(project_dir)
    except ForgatherError as error:
        return ProjectListing(project_dir=project_dir, name=os.path.basename(project_dir), error=reason(error, display))
    # Only `fgcli check` shows lints.
    warnings = [_one_line(found, display) for found in meta.diagnostics if found.severity is not Severity.LINT]
    return ProjectListing(
        project_dir=project_dir,
        name=meta.name,
        description=" ".join(meta.description.split()),
        default_config=meta.default_config,
        searchdir=meta.searchdir,
        config_prefix=meta.config_prefix,
        warnings=tuple(warnings),
        dependencies=meta.dependencies,
    )


def describe_config(project_dir: str, name: str, display: Display) -> ConfigListing:
    """Returns the listing of one config.

    Args:
        project_dir: the absolute folder of the project.
        name: the name of the config.
        display: the object that shortens paths in messages.
    """
    try:
        project = Project(name, project_dir)
        facts = run_meta(project.graph)
        errors = [found for found in project.diagnostics if found.severity is Severity.ERROR]
        errors += [fault.error.diagnostic for fault in read_options(project.graph).faults]
    except ForgatherError as error:
        return ConfigListing(name=name, error=reason(error, display))
    return ConfigListing(
        name=name,
        title=facts.name,
        description=facts.description,
        config_class=facts.config_class,
        output_dir=trainer_output_dir(project.graph) or "",
        error=_one_line(errors[0], display) if errors else None,
        dependencies=dependencies_of(project.rendered, project.meta.searchpath),
    )


def reason(error: ForgatherError, display: Display) -> str:
    """Returns one line that says why a config is broken.

    Args:
        error: the error of the config.
        display: the object that shortens the path in the line.
    """
    return _one_line(error.diagnostic, display)


def _one_line(found: Diagnostic, display: Display) -> str:
    place = f"  ({display(found.span.file)}:{found.span.line})" if found.span else ""
    message = found.message.split("\n")[0]
    return f"{found.severity}[{found.code}]: {message[:200]}{place}"
