"""The HTML page of a config.

Takes a `Project`; gives an HTML document. Nothing that the config names is imported, and files are named relative to
the project, the workspace or the library.
"""

from __future__ import annotations

from forgather.codegen.page.page import page, page_data
from forgather.project.path_display import Display
from forgather.project.project import Project


def config_page(project: Project) -> str:
    """Returns the HTML page that shows a config: its objects, templates and text."""
    meta = project.meta
    return page(
        page_data(
            project.graph,
            project.rendered,
            shorten=Display(meta.project_dir, meta.workspace_root, relative_to_cwd=False),
            config=project.config_name,
            project=meta.name,
            overrides=project.overrides,
            findings=project.diagnostics,
        )
    )
