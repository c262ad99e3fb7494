"""What `fgcli ls` shows of a project, and its cache.

Takes a project folder, gives a `ProjectListing`. A description is known only after rendering, so listings are kept,
each with what it was made from: digest of every file read, names that were looked for in vain, environment variables.
Keeps true: an entry is used only when all of that still holds; a corrupt, foreign or open entry is as good as none;
broken configs are never kept. What a description takes from the clock is as it was when the config last changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from forgather import __version__
from forgather.project.locations import cache_dir, library_dir

_FORM = 1
_MAX_ENTRY_BYTES = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """What a listing was made from.

    Args:
        files: digest of each file that was read.
        absent: files that would have been read instead, had they existed.
        env: environment variables, None where unset.
    """

    files: dict[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ConfigListing:
    """One config of a project, for a list.

    Args:
        name: what `-t` takes.
        title: `config_name` of its `meta`.
        description: `config_description` of its `meta`.
        config_class: `config_class` of its `meta`.
        error: one line that says why it is broken; None for a sound config.
        dependencies: None where the listing must not be kept.
    """

    name: str
    title: str = ""
    description: str = ""
    config_class: str = ""
    error: str | None = None
    dependencies: Dependencies | None = None


@dataclass(frozen=True, kw_only=True)
class ProjectListing:
    """A project and its configs.

    Args:
        project_dir: absolute folder.
        name: the project's name.
        description: one line.
        default_config: name of the config that is meant when none is named.
        searchdir: absolute folders of its configs.
        config_prefix: folder of the configs inside each.
        error: one line that says why the project cannot be read; None for a sound one.
        warnings: one line each.
        configs: the configs, in order.
        dependencies: None where the listing must not be kept.
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
    """Returns the kept listing of a project with the configs that still hold; None without a sound entry."""
    file = _entry_file(project_dir)
    facts = _read_entry(file) if file else None
    if facts is None:
        return None
    try:
        listing = _restore(facts)
    except (TypeError, ValueError, KeyError):
        return None
    digest = _digests()
    if listing.project_dir != project_dir or not _holds(listing.dependencies, digest):
        return None
    configs = tuple(config for config in listing.configs if _holds(config.dependencies, digest))
    return _with_configs(listing, configs)


def keep_listing(listing: ProjectListing) -> None:
    """Keeps a listing for the next time, where there is a cache folder."""
    file = _entry_file(listing.project_dir)
    if file is None or listing.error or listing.dependencies is None:
        return
    sound = tuple(config for config in listing.configs if config.error is None and config.dependencies is not None)
    body = json.dumps({"form": _FORM, "listing": asdict(_with_configs(listing, sound))}).encode()
    try:
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(file), delete=False) as stream:
            stream.write(_digest(body).encode() + b"\n" + body)
        os.replace(stream.name, file)
    except OSError:
        return


def file_digest(file: str) -> str | None:
    """Returns the digest of a file's content; None where it cannot be read."""
    try:
        with open(file, "rb") as stream:
            return _digest(stream.read())
    except OSError:
        return None


def _with_configs(listing: ProjectListing, configs: tuple[ConfigListing, ...]) -> ProjectListing:
    return ProjectListing(**{**listing.__dict__, "configs": configs})


def _holds(made_from: Dependencies | None, digest: Callable[[str], str | None]) -> bool:
    return (
        made_from is not None
        and all(digest(file) == known for file, known in made_from.files.items())
        and not any(os.path.lexists(file) for file in made_from.absent)
        and all(os.environ.get(name) == value for name, value in made_from.env.items())
    )


def _digests() -> Callable[[str], str | None]:
    known: dict[str, str | None] = {}

    def digest(file: str) -> str | None:
        if file not in known:
            known[file] = file_digest(file)
        return known[file]

    return digest


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def _entry_file(project_dir: str) -> str | None:
    folder = cache_dir("listings")
    if folder is None:
        return None
    host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
    key = "\0".join((str(_FORM), __version__, library_dir(), host, project_dir))
    return os.path.join(folder, _digest(os.fsencode(key)) + ".json")


def _read_entry(file: str) -> dict[str, Any] | None:
    try:
        with open(file, "rb") as stream:
            facts = os.fstat(stream.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_ENTRY_BYTES or _is_foreign(facts):
                return None
            digest, _, body = stream.read().partition(b"\n")
        if digest != _digest(body).encode():
            return None
        entry = json.loads(body)
    except (OSError, ValueError):
        return None
    return entry["listing"] if isinstance(entry, dict) and entry.get("form") == _FORM else None


def _is_foreign(facts: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and (facts.st_uid != os.geteuid() or bool(facts.st_mode & 0o022))


def _restore(facts: dict[str, Any]) -> ProjectListing:
    configs = tuple(
        ConfigListing(**{**config, "dependencies": _dependencies(config["dependencies"])})
        for config in facts["configs"]
    )
    return ProjectListing(
        **{
            **facts,
            "configs": configs,
            "searchdir": tuple(facts["searchdir"]),
            "warnings": tuple(facts["warnings"]),
            "dependencies": _dependencies(facts["dependencies"]),
        }
    )


def _dependencies(facts: dict[str, Any]) -> Dependencies:
    return Dependencies(files=dict(facts["files"]), absent=tuple(facts["absent"]), env=dict(facts["env"]))
