"""Facts kept between commands, each with what it was made from.

Takes facts as plain data, gives them back while all they were made from still holds: the digest of every file that
was read, names that were looked for in vain, environment variables. Keeps true: an entry that is corrupt, foreign,
open to others or of another version is as good as none; without a cache folder nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from forgather import __version__
from forgather.project.locations import cache_dir, config_dir, library_dir

FORM = 1
_MAX_ENTRY_BYTES = 5_000_000


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


class Digests:
    """Digests of files, each read once."""

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def __call__(self, file: str) -> str | None:
        """Returns the digest of a file's content; None where it cannot be read."""
        if file not in self._known:
            try:
                with open(file, "rb") as stream:
                    self._known[file] = _digest(stream.read())
            except OSError:
                self._known[file] = None
        return self._known[file]


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
    if file is None:
        return None
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
    return entry["facts"] if isinstance(entry, dict) and entry.get("form") == FORM else None


def keep_entry(part: str, name: str, facts: dict[str, Any]) -> None:
    """Keeps facts under a name, where there is a cache folder."""
    file = _entry_file(part, name)
    if file is None:
        return
    with suppress(OSError):
        content = json.dumps({"form": FORM, "facts": facts}).encode()
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(file), delete=False) as stream:
            stream.write(sealed(content))
        os.replace(stream.name, file)


def sealed(body: bytes) -> bytes:
    """Returns an entry's body behind its digest."""
    return _digest(body).encode() + b"\n" + body


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def _entry_file(part: str, name: str) -> str | None:
    folder = cache_dir(part)
    if folder is None:
        return None
    host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
    key = "\0".join((str(FORM), __version__, library_dir(), config_dir(), host, name))
    return os.path.join(folder, _digest(os.fsencode(key)) + ".json")


def _is_foreign(facts: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and (facts.st_uid != os.geteuid() or bool(facts.st_mode & 0o022))
