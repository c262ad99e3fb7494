"""Facts kept between commands, each with what it was made from.

Takes facts as plain data, gives them back while all they were made from still holds: the digest of every file that
was read, names that were looked for in vain, environment variables. Keeps true: an entry that is corrupt, foreign,
open to others or made by other code than that of now is as good as none; without a cache folder nothing is kept.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forgather.cache_file import Digests, digest_of, edition, keep, read_kept
from forgather.project.locations import cache_dir, config_dir, library_dir

if TYPE_CHECKING:
    from forgather.config.rendered import RenderedText

FORM = 1
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
# The code that makes the facts.
_CODE = tuple(
    os.path.join(_PACKAGE, folder)
    for folder in (
        "",
        "config",
        "config/_jinja",
        "config/insight",
        "config/lint",
        "config/yaml",
        "project",
        "project/checks",
    )
)


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """What a fact was made from.

    Args:
        files: digest of each file that was read.
        absent: files that would have been read instead, had they existed.
        env: environment variables, None where unset.
    """

    files: dict[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)


def holds(made_from: Dependencies | None, digest: Digests) -> bool:
    """Whether everything that a fact was made from is still as it was."""
    return (
        made_from is not None
        and all(digest(file) == known for file, known in made_from.files.items())
        and not any(os.path.lexists(file) for file in made_from.absent)
        and all(os.environ.get(name) == value for name, value in made_from.env.items())
    )


def restore_dependencies(facts: dict[str, Any]) -> Dependencies:
    """Returns dependencies that were kept as plain data."""
    return Dependencies(files=dict(facts["files"]), absent=tuple(facts["absent"]), env=dict(facts["env"]))


def read_entry(part: str, name: str) -> dict[str, Any] | None:
    """Returns the facts kept under a name in one part of the cache; None without a sound entry."""
    file = _entry_file(part, name)
    return None if file is None else read_kept(file, FORM)


def keep_entry(part: str, name: str, facts: dict[str, Any]) -> None:
    """Keeps facts under a name, where there is a cache folder."""
    file = _entry_file(part, name)
    if file is not None:
        keep(file, FORM, facts)


def _entry_file(part: str, name: str) -> str | None:
    folder = cache_dir(part)
    if folder is None:
        return None
    host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
    key = "\0".join((edition(*_CODE), library_dir(), config_dir(), host, name))
    return os.path.join(folder, digest_of(os.fsencode(key)) + ".json")


# A template that looks for one of several names may change its mind when a file appears that was never asked for.
_LOOKS_AROUND = re.compile(r"ignore\s+missing|\b(?:include|extends|import|from)\s*[\[(]")


def made_from(rendered: RenderedText, searchpath: tuple[str, ...]) -> Dependencies | None:
    """Returns what a text depends on; None where that cannot be told."""
    if any(_LOOKS_AROUND.search(source.text) for source in rendered.sources.values()):
        return None
    digest = Digests()
    files = {file: digest(file) for file in rendered.sources if os.path.isabs(file)}
    sound = {file: value for file, value in files.items() if value is not None}
    if len(sound) != len(files):
        return None
    env = {name: os.environ.get(name) for name in rendered.env_reads}
    return Dependencies(files=sound, absent=_absent(rendered, searchpath), env=env)


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
