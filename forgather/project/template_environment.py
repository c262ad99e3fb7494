"""The environment of a project's templates: search path, standard variables, template cache.

The input is the folders of a project; the output is a new `ConfigEnvironment` for every load. Creating an environment
imports no library and starts no process.
"""

from __future__ import annotations

import os

from forgather.config.environment import ConfigEnvironment
from forgather.project.locations import cache_dir
from forgather.project.metadata import ProjectMeta
from forgather.project.trust import stored_trust
from forgather.project.versions import VersionTable

STANDARD_VARIABLES = ("project_dir", "workspace_root", "hostname", "uname", "versions", "config_stem")
"""The standard variables, which every template can read; options of a config cannot replace them."""


def template_environment(
    searchpath: tuple[str, ...], *, project_dir: str, workspace_root: str | None
) -> ConfigEnvironment:
    """Returns the environment of one load.

    Args:
        searchpath: the absolute folders of templates; the first folder that contains a template is used.
        project_dir: the absolute folder of the project.
        workspace_root: the absolute folder of the workspace; None outside a workspace, in which case templates see the
            project's folder in its place.
    """
    system = host_facts()
    variables = {
        "project_dir": project_dir,
        "workspace_root": workspace_root or project_dir,
        "hostname": system["node"],
        "uname": system,
        "versions": VersionTable(),
    }
    return ConfigEnvironment(
        searchpath=searchpath, variables=variables, cache_dir=cache_dir("templates"), allowed_env=_allowed_env
    )


def project_environment(meta: ProjectMeta) -> ConfigEnvironment:
    """Returns the environment of one load for a project in the file system."""
    return template_environment(meta.searchpath, project_dir=meta.project_dir, workspace_root=meta.workspace_root)


def _allowed_env() -> tuple[str, ...]:
    return stored_trust().variables


def host_facts() -> dict[str, str]:
    """Returns the facts about the machine that templates see as `uname`."""
    # platform.uname() may start a process for the processor's name; os.uname() never does.
    if hasattr(os, "uname"):
        facts = os.uname()
        return dict(zip(("system", "node", "release", "version", "machine"), facts, strict=True))
    import platform

    names = ("system", "node", "release", "version", "machine")
    return {name: str(getattr(platform, name)()) for name in names}
