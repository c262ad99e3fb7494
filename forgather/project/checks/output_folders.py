"""Checks whether two configs of a project save to the same folder, so that a later run would replace the earlier model.

The input is a config; the output is a finding. Only a folder that the template library derived from the config's name
is reported; a folder that the config or the command line names may be used by several configs. Facts about the other
configs come from the cache of `fgcli ls`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from forgather.config.graph import Entry
from forgather.errors import Diagnostic, ForgatherError
from forgather.project.checks.subject import Subject
from forgather.project.configs import config_files
from forgather.project.listing import describe_config, describe_project
from forgather.project.listing_cache import ConfigListing, cached_listing, store_listing
from forgather.project.literal import string_entries
from forgather.project.locations import library_dir
from forgather.project.path_display import Display
from forgather.project.project import Project
from forgather.project.targets import run_meta
from forgather.project.trainer_arguments import trainer_arguments
from forgather.source import Span


def check_output_folder(subject: Subject) -> Iterator[Diagnostic]:
    """Yields an error if another config of the project saves to the folder that is derived from this config's name."""
    project = subject.project
    folder = _derived_folder(project)
    if folder is None:
        return
    others = [
        one.name for one in _other_configs(project) if one.output_dir and os.path.realpath(one.output_dir) == folder
    ]
    if not others:
        return
    yield Diagnostic(
        code="FG421",
        message=f"the model is saved in {os.path.relpath(folder, project.meta.project_dir)}, and so is that of "
        f"{', '.join(others[:3])}: each run would replace the other's",
        span=_naming_line(project),
        path="meta.config_name",
        hint='give this config a name of its own: `-- set ns.config_name = "..."` in [config_metadata]; to share the '
        "folder, name it: `-- set ns.output_dir = ...`",
    )


def _derived_folder(project: Project) -> str | None:
    """Returns the output folder if the template library derived it from the config's name; None otherwise."""
    arguments = trainer_arguments(project.graph)
    entry = arguments.entry("output_dir") if arguments else None
    folder = arguments.plain("output_dir") if arguments else None
    if entry is None or not isinstance(folder, str) or "output_dir" in project.variables:
        return None
    written_in = entry.span.file if entry.span else ""
    try:
        name = run_meta(project.graph).name
    except ForgatherError:
        # An error in `meta` is reported by its own check.
        return None
    # The templates of the library derive the folder in this way.
    by_default = {name.lower().replace(" ", "_"), project.config_stem}
    parent, base = os.path.split(folder)
    is_default = parent == os.path.join(project.meta.project_dir, "output_models") and base in by_default
    return os.path.realpath(folder) if is_default and written_in.startswith(library_dir()) else None


def _other_configs(project: Project) -> list[ConfigListing]:
    """Returns the facts about the other configs; those that are not in the cache are read and stored."""
    meta, display = project.meta, Display(project.meta.project_dir)
    names = [name for name in config_files(meta.searchdir, meta.config_prefix) if name != project.config_name]
    if not names:
        return []
    listing = cached_listing(meta.project_dir) or describe_project(meta.project_dir, display)
    known = {one.name: one for one in listing.configs}
    found = [known.get(name) or describe_config(meta.project_dir, name, display) for name in names]
    if any(one.name not in known for one in found):
        known |= {one.name: one for one in found}
        store_listing(replace(listing, configs=tuple(known[name] for name in sorted(known))))
    return found


def _naming_line(project: Project) -> Span:
    """Returns the line of the project that sets the name of the config, or else the first line of the config."""
    entry: Entry | None = project.graph.targets.get("meta")
    own = os.path.join(project.meta.project_dir, "")
    named = string_entries(entry.value) if entry else ()
    for one in named:
        for site in one.value.origin.sets if one.key == "config_name" and one.value.origin else ():
            if site.span.file.startswith(own):
                return Span(site.span.file, site.span.line)
    return Span(project.rendered.templates[0].file, 1)
