"""`fgcli ls`: lists projects, and the configs of each project with descriptions. Constructs nothing."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import Line, write_json, write_lines
from forgather.cli.palette import styled
from forgather.errors import ProjectError
from forgather.project.configs import config_files
from forgather.project.listing_cache import ConfigListing, ProjectListing, cached_listing, store_listing
from forgather.project.path_display import Display
from forgather.project.workspace import find_project, find_projects

DESCRIPTION = """List projects, their configs and what each is for; * marks the default config.
A broken config is listed with its reason, and makes the exit status 1."""
EXAMPLES = """examples:
  fgcli ls                      the project you are in
  fgcli ls -r                   every project below this folder
  fgcli ls projects/tiny_llama --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("-r", "--recursive", action="store_true", help="every project at or below each DIR")
    parser.add_argument("folders", nargs="*", metavar="DIR", help="project folder; with -r, where to look")
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the list, and returns the exit status."""
    listings = [_listing(folder) for folder in _projects(invocation)]
    if invocation.options.json:
        write_json({"projects": [_fact(listing) for listing in listings]})
    else:
        lines = [line for listing in listings for line in (*_lines(listing), Line(""))]
        write_lines(lines[:-1])
    return int(any(listing.error or any(config.error for config in listing.configs) for listing in listings))


def _projects(invocation: Invocation) -> list[str]:
    options = invocation.options
    named = options.folders or ([invocation.project_dir] if invocation.project_dir else [])
    if not options.recursive:
        return [find_project(folder) for folder in named] if named else [find_project()]
    found: dict[str, None] = {}
    for folder in named or ["."]:
        if not os.path.isdir(folder):
            raise ProjectError(f"no folder {folder!r}", code="FG401", hint="name a folder to look in")
        found |= dict.fromkeys(find_projects(folder))
    if not found:
        raise ProjectError(
            f"no project at or below {', '.join(named) or os.getcwd()!r}",
            code="FG400",
            hint="a project is a folder with a 'meta.yaml'; 'fgcli new project NAME' makes one",
        )
    return list(found)


def _listing(project_dir: str) -> ProjectListing:
    display = Display(project_dir)
    listing = cached_listing(project_dir)
    known = {config.name: config for config in listing.configs} if listing else {}
    if listing is None:
        # A late import: the stages are not needed for what is in the cache.
        from forgather.project.listing import describe_project

        listing = describe_project(project_dir, display)
    configs = [
        known.get(name) or _describe(project_dir, name, display)
        for name in config_files(listing.searchdir, listing.config_prefix)
    ]
    if any(config.name not in known for config in configs) or len(known) != len(configs):
        store_listing(replace(listing, configs=tuple(configs)))
    return replace(listing, configs=tuple(configs), default_config=_default([c.name for c in configs], listing))


def _default(names: list[str], listing: ProjectListing) -> str | None:
    if listing.default_config is None:
        return names[0] if len(names) == 1 else None
    return next((name for name in names if name in (listing.default_config, f"{listing.default_config}.yaml")), None)


def _describe(project_dir: str, name: str, display: Display) -> ConfigListing:
    from forgather.project.listing import describe_config

    return describe_config(project_dir, name, display)


def _lines(listing: ProjectListing) -> list[Line]:
    folder = os.path.relpath(listing.project_dir)
    head = f"{folder}  {listing.name}" + (f": {listing.description}" if listing.description else "")
    lines = [Line(head, lambda line: styled("strong", line[: len(folder)]) + line[len(folder) :], len(folder) + 2)]
    lines += [Line(f"  ! {problem}", _paint_problem) for problem in (*listing.warnings, listing.error) if problem]
    width = max((len(config.name) for config in listing.configs), default=0)
    for config in listing.configs:
        is_default = config.name == listing.default_config
        text = f"! {config.error}" if config.error else config.description or config.title
        row = f"  {'*' if is_default else ' '} {config.name:<{width}}  "
        lines.append(_row(row, text, is_default=is_default, is_broken=bool(config.error)))
    if not listing.configs and not listing.error:
        lines.append(Line("    no configs; 'fgcli new config NAME' makes one"))
    return lines


def _row(head: str, text: str, *, is_default: bool, is_broken: bool) -> Line:
    def paint(line: str) -> str:
        name = styled("good" if is_default else "key", head.rstrip())
        return name + (_paint_problem if is_broken else str)(line[len(head.rstrip()) :])

    return Line(f"{head}{text}".rstrip(), paint, len(head))


def _paint_problem(line: str) -> str:
    return styled("error", line)


def _fact(listing: ProjectListing) -> dict[str, object]:
    return {
        "project_dir": listing.project_dir,
        "name": listing.name,
        "description": listing.description,
        "default_config": listing.default_config,
        "error": listing.error,
        "warnings": list(listing.warnings),
        "configs": [
            {
                "name": config.name,
                "config_name": config.title,
                "description": config.description,
                "config_class": config.config_class,
                "error": config.error,
            }
            for config in listing.configs
        ],
    }
