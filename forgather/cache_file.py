"""Cache files, in which a command stores plain data for later commands. Each file is one cache entry.

An entry is treated as missing if it is corrupt, if it has another format, or if another user owns the file or can write
to it. Two processes may write one entry at the same time. If a file cannot be written, nothing is cached and no error
is raised.
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
    """Content digests of files; each file is read once.

    Args:
        most: the size limit in bytes; None is returned as the digest of a larger file.
    """

    def __init__(self, most: int = MAX_RECORD_BYTES) -> None:
        self._most = most
        self._known: dict[str, str | None] = {}

    def __call__(self, file: str) -> str | None:
        """Returns the digest of a file's content; None if the file cannot be read."""
        if file not in self._known:
            try:
                with open_regular(file) as stream:
                    is_read = os.fstat(stream.fileno()).st_size <= self._most
                    self._known[file] = digest_of_stream(stream) if is_read else None
            except OSError:
                self._known[file] = None
        return self._known[file]


def digest_of_stream(stream: BinaryIO) -> str:
    """Returns the digest of the content of a stream, which is read in chunks."""
    digest = hashlib.blake2b(digest_size=20)
    while part := stream.read(_CHUNK):
        digest.update(part)
    return digest.hexdigest()


def digest_of(content: bytes) -> str:
    """Returns the digest of `content`."""
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def with_digest(body: bytes) -> bytes:
    """Returns the body of a cache entry, preceded by the digest of the body."""
    return digest_of(body).encode() + b"\n" + body


@cache
def code_fingerprint(*folders: str) -> str:
    """Returns a text that changes whenever the code in these folders changes.

    The version number is not enough: in a checkout, code changes without a new version.
    """
    states: list[tuple[str, int]] = []
    for folder in folders:
        with os.scandir(folder) as files:
            states += [(file.path, file.stat().st_mtime_ns) for file in files if file.name.endswith(".py")]
    return f"{__version__} {digest_of(repr(sorted(states)).encode())}"


def read_cached(file: str, form: int) -> dict[str, Any] | None:
    """Returns the facts in a cache file, or None if the file is not an intact entry of the expected format.

    Args:
        file: the path of the cache file.
        form: the number of the expected format.
    """
    try:
        with open_regular(file) as stream:
            facts = os.fstat(stream.fileno())
            # Another user who could write here would decide what commands of this user believe.
            if facts.st_size > _MAX_ENTRY_BYTES or _is_foreign(facts):
                return None
            digest, _, body = stream.read().partition(b"\n")
        # An entry that was cut or edited has another digest.
        if digest != digest_of(body).encode():
            return None
        entry = json.loads(body)
    except (OSError, ValueError, RecursionError):
        return None
    return entry["facts"] if isinstance(entry, dict) and entry.get("form") == form else None


def write_cached(file: str, form: int, facts: dict[str, Any]) -> None:
    """Stores facts in a cache file; does nothing if the file cannot be written.

    Args:
        file: the path of the cache file, in a folder that only this user can write.
        form: the number of the format.
        facts: the data, which JSON must be able to represent.
    """
    with suppress(OSError):
        content = json.dumps({"form": form, "facts": facts}).encode()
        # A rename replaces the entry in one step, so that a reader never sees half of it.
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(file), delete=False) as stream:
            try:
                stream.write(with_digest(content))
                stream.flush()
                os.replace(stream.name, file)
            except OSError:
                os.unlink(stream.name)


def _is_foreign(facts: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and (facts.st_uid != os.geteuid() or bool(facts.st_mode & 0o022))
