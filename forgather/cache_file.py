"""Files of facts kept between commands.

Takes facts as plain data, gives them back. Keeps true: an entry that is corrupt, foreign, open to others or of another
form is as good as none; two processes may write one entry at once; where a file cannot be written, nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from functools import cache
from typing import Any, BinaryIO

from forgather import __version__
from forgather.bounded import MAX_RECORD_BYTES, open_regular

_MAX_ENTRY_BYTES = 5_000_000
_CHUNK = 1 << 20


class Digests:
    """Digests of files, each read once.

    Args:
        most: bytes of a file that are read; one that is larger has no digest.
    """

    def __init__(self, most: int = MAX_RECORD_BYTES) -> None:
        self._most = most
        self._known: dict[str, str | None] = {}

    def __call__(self, file: str) -> str | None:
        """Returns the digest of a file's content; None where it cannot be read."""
        if file not in self._known:
            try:
                with open_regular(file) as stream:
                    is_read = os.fstat(stream.fileno()).st_size <= self._most
                    self._known[file] = digest_of_stream(stream) if is_read else None
            except OSError:
                self._known[file] = None
        return self._known[file]


def digest_of_stream(stream: BinaryIO) -> str:
    """Returns the digest of what a stream holds, without holding all of it at once."""
    digest = hashlib.blake2b(digest_size=20)
    while part := stream.read(_CHUNK):
        digest.update(part)
    return digest.hexdigest()


def digest_of(content: bytes) -> str:
    """Returns a short digest of a content."""
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def sealed(body: bytes) -> bytes:
    """Returns an entry's body behind its digest."""
    return digest_of(body).encode() + b"\n" + body


@cache
def edition(*folders: str) -> str:
    """Returns what changes whenever the code in these folders does: in a checkout, one version has many sources."""
    states: list[tuple[str, int]] = []
    for folder in folders:
        with os.scandir(folder) as files:
            states += [(file.path, file.stat().st_mtime_ns) for file in files if file.name.endswith(".py")]
    return f"{__version__} {digest_of(repr(sorted(states)).encode())}"


def read_kept(file: str, form: int) -> dict[str, Any] | None:
    """Returns the facts kept in a file; None without a sound entry of that form."""
    try:
        with open_regular(file) as stream:
            facts = os.fstat(stream.fileno())
            if facts.st_size > _MAX_ENTRY_BYTES or _is_foreign(facts):
                return None
            digest, _, body = stream.read().partition(b"\n")
        if digest != digest_of(body).encode():
            return None
        entry = json.loads(body)
    except (OSError, ValueError, RecursionError):
        return None
    return entry["facts"] if isinstance(entry, dict) and entry.get("form") == form else None


def keep(file: str, form: int, facts: dict[str, Any]) -> None:
    """Keeps facts in a file of a private folder."""
    with suppress(OSError):
        content = json.dumps({"form": form, "facts": facts}).encode()
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(file), delete=False) as stream:
            try:
                stream.write(sealed(content))
                stream.flush()
                os.replace(stream.name, file)
            except OSError:
                os.unlink(stream.name)


def _is_foreign(facts: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and (facts.st_uid != os.geteuid() or bool(facts.st_mode & 0o022))
