"""The cache of `fgcli ls`: listings of projects and configs, stored on disk.

The input is a project folder; the output is a `ProjectListing`. The description of a config is known only after
rendering, so it is stored with its dependencies. A broken config is never stored. If a description contains the time,
the listing shows the time of the last render.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from forgather.cache_file import Digests
from forgather.project.fact_cache import Dependencies, is_current, read_entry, restore_dependencies, write_entry

_PART = "listings"


@dataclass(frozen=True, kw_only=True)
class ConfigListing:
    """One config in a listing.

    Args:
        name: the name for `-t`.
        title: the value of `config_name` in the target `meta`.
        description: the value of `config_description` in the target `meta`.
        config_class: the value of `config_class` in the target `meta`.
        output_dir: the folder that the trainer saves to; "" if it is not a plain value.
        error: the reason why the config is broken, one line; None if the config is valid.
        dependencies: what the listing depends on; None if the listing must not be stored.
    """

    name: str
    title: str = ""
    description: str = ""
    config_class: str = ""
    output_dir: str = ""
    error: str | None = None
    dependencies: Dependencies | None = None


@dataclass(frozen=True, kw_only=True)
class ProjectListing:
    """A project and its configs.

    Args:
        project_dir: the absolute folder of the project.
        name: the name of the project.
        description: the description of the project, one line.
        default_config: the config that is used if none is named; None if there is no default.
        searchdir: the absolute search folders of the project's configs.
        config_prefix: the folder of the configs inside each search folder.
        error: the reason why the project cannot be read, one line; None if it can be read.
        warnings: the warnings about the project, one line each.
        configs: the configs, in order.
        dependencies: what the listing depends on; None if the listing must not be stored.
    """

    project_dir: str
    name: str = ""
    description: str = ""
    default_config: str | None = None
    searchdir: tuple[str, ...] = ()
    config_prefix: str = "configs"
    error: str | None = None
    warnings: tuple[str, ...] = ()
    configs: tuple[ConfigListing, ...] = ()
    dependencies: Dependencies | None = None


def cached_listing(project_dir: str) -> ProjectListing | None:
    """Returns the stored listing, with those configs that are unchanged; None if there is no intact entry."""
    facts = read_entry(_PART, project_dir)
    if facts is None:
        return None
    try:
        listing = _restore(facts)
    except (TypeError, ValueError, KeyError):
        return None
    # One object for all configs, which share templates: each file is read once.
    digest = Digests()
    if listing.project_dir != project_dir or not is_current(listing.dependencies, digest):
        return None
    return replace(listing, configs=tuple(one for one in listing.configs if is_current(one.dependencies, digest)))


def store_listing(listing: ProjectListing) -> None:
    """Stores a listing in the cache, if there is a cache folder."""
    if listing.error is None and listing.dependencies is not None:
        sound = tuple(one for one in listing.configs if one.error is None and one.dependencies is not None)
        write_entry(_PART, listing.project_dir, asdict(replace(listing, configs=sound)))


def _restore(facts: dict[str, Any]) -> ProjectListing:
    configs = tuple(
        ConfigListing(**{**config, "dependencies": restore_dependencies(config["dependencies"])})
        for config in facts["configs"]
    )
    # JSON turns tuples into lists.
    changes = {
        "configs": configs,
        "searchdir": tuple(facts["searchdir"]),
        "warnings": tuple(facts["warnings"]),
        "dependencies": restore_dependencies(facts["dependencies"]),
    }
    return ProjectListing(**{**facts, **changes})
