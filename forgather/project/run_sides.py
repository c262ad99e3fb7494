"""A past run, and what its config gives now, as sides of a comparison.

Takes the folder of a run, gives `Compared`. Keeps true: the config of now is given what the run was given (options,
`--set`, clock, host), so that only what was changed since is a difference.
"""

from __future__ import annotations

import os
from dataclasses import replace

from forgather.errors import ForgatherError
from forgather.project.compared import Compared, code_digests
from forgather.project.configs import choose_config
from forgather.project.declared import without_options
from forgather.project.defaults import read_defaults
from forgather.project.display import Display, near_path
from forgather.project.metastore import load_meta
from forgather.project.past_run import open_run
from forgather.project.project import Project
from forgather.project.surroundings import surroundings
from forgather.project.workspace import find_project


def open_past(folder: str) -> Compared:
    """Returns a run as it was.

    Raises:
        ProjectError: the folder is that of no run, or is damaged.
    """
    run = open_run(folder)
    return Compared(
        title=near_path(run.folder),
        graph=without_options(run.graph),
        place=run.place,
        config=run.config,
        code=code_digests(run.graph, run.archive),
        defaults=run.defaults,
        notes=run.notes,
        declared=run.rendered_again,
    )


def config_now(folder: str) -> Compared:
    """Returns what the config of a run gives now.

    Raises:
        ForgatherError: the project or the config is gone, or broken.
    """
    run = open_run(folder)
    try:
        meta = load_meta(find_project(run.project_dir))
        config = choose_config(meta, run.config)
    except ForgatherError as error:
        error.context = (*error.context, f"the config of the run {os.path.basename(run.folder)}")
        raise
    variables, overrides = run.changes
    now = surroundings(meta.searchpath, project_dir=meta.project_dir, workspace_root=meta.workspace_root)
    then = run.environment()
    told = {name: value for name, value in then.variables.items() if name in ("hostname", "uname") and value}
    environment = replace(now, now=then.now, variables={**now.variables, **told})
    project = Project.placed(meta, config, environment=environment, overrides=overrides, variables=variables)
    return Compared(
        title=f"{config} now",
        graph=without_options(project.graph),
        place=Display(meta.project_dir, meta.workspace_root),
        config=config,
        code=code_digests(project.graph, meta.project_dir),
        defaults=read_defaults(project.graph, meta),
        declared=project.graph,
    )
