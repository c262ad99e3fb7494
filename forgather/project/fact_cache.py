"""A cache on disk for facts about projects and configs.

Facts are plain data. They are stored with what they depend on: the digests of the files that were read, files that were
searched but did not exist, and environment variables. The cache returns the facts as long as all of these are
unchanged. An entry is ignored if it is corrupt, was written by another version of the code, or could have been changed
by another user. Without a cache folder, nothing is stored.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forgather.cache_file import Digests, code_fingerprint, digest_of, read_cached, write_cached
from forgather.project.locations import cache_dir, config_dir, library_dir

if TYPE_CHECKING:
    from forgather.config.rendered import RenderedText

FORM = 1
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
# The folders with the code that makes the facts: a change of it invalidates every entry.
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
    """The files and environment variables that a fact depends on.

    Args:
        files: the digest of each file that was read.
        absent: the files that would have been read instead if they had existed.
        env: the values of environment variables; None for a variable that is not set.
    """

    files: dict[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    env: dict[str, str | None] = field(default_factory=dict)


def is_current(made_from: Dependencies | None, digest: Digests) -> bool:
    """Returns whether everything that a fact depends on is unchanged.

    Args:
        made_from: the dependencies of the fact; None if they are unknown, so that the result is False.
        digest: the function that returns the digest of a file, and computes each digest only once.
    """
    return (
        made_from is not None
        and all(digest(file) == known for file, known in made_from.files.items())
        and not any(os.path.lexists(file) for file in made_from.absent)
        and all(os.environ.get(name) == value for name, value in made_from.env.items())
    )


def restore_dependencies(facts: dict[str, Any]) -> Dependencies:
    """Returns dependencies from the plain data that the cache stores."""
    return Dependencies(files=dict(facts["files"]), absent=tuple(facts["absent"]), env=dict(facts["env"]))


def read_entry(part: str, name: str) -> dict[str, Any] | None:
    """Returns the facts in an entry of the cache; None if there is no intact entry.

    Args:
        part: the folder inside the cache that contains the entry.
        name: the name of the entry.
    """
    file = _entry_file(part, name)
    return None if file is None else read_cached(file, FORM)


def write_entry(part: str, name: str, facts: dict[str, Any]) -> None:
    """Stores facts in the cache, if there is a cache folder.

    Args:
        part: the folder inside the cache that will contain the entry.
        name: the name of the entry.
        facts: the facts as plain data.
    """
    file = _entry_file(part, name)
    if file is not None:
        write_cached(file, FORM, facts)


def _entry_file(part: str, name: str) -> str | None:
    folder = cache_dir(part)
    if folder is None:
        return None
    # A home folder may be shared by machines on which templates see other values.
    host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
    key = "\0".join((code_fingerprint(*_CODE), library_dir(), config_dir(), host, name))
    return os.path.join(folder, digest_of(os.fsencode(key)) + ".json")


# A template that tries several names may use another one once a file appears that was never looked for.
_LOOKS_AROUND = re.compile(r"ignore\s+missing|\b(?:include|extends|import|from)\s*[\[(]")


def dependencies_of(rendered: RenderedText, searchpath: tuple[str, ...]) -> Dependencies | None:
    """Returns the dependencies of a rendered text; None if they cannot be determined.

    Args:
        rendered: the text, with the files that it was rendered from.
        searchpath: the absolute folders of templates, in the order in which they are searched.
    """
    if any(_LOOKS_AROUND.search(source.text) for source in rendered.sources.values()):
        return None
    digest = Digests()
    files = {file: digest(file) for file in rendered.sources if os.path.isabs(file)}
    sound = {file: value for file, value in files.items() if value is not None}
    # A file that can no longer be read may have changed after it was rendered.
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
