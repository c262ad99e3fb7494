"""The content of files without reading them whole: a digest of samples, and a stamp that changes with each writing.

Takes a file, or a range of bytes of one; gives texts that a checkpoint stores and a resumed run compares. A stamp says
whether a closer look is needed, a digest whether the content is another one.
"""

from __future__ import annotations

import os
from typing import Any

import xxhash

_CHUNKS = 16
_CHUNK_BYTES = 4096
_REMOTE_FACTS = ("ETag", "etag", "blob_id", "generation", "md5Hash", "LastModified", "mtime", "updated", "size")


def sampled_digest(file: str, begin: int = 0, end: int | None = None) -> str:
    """Returns a digest of up to 16 pieces of 4 KiB of a range of bytes, from its begin to its end.

    Args:
        file: the path of a local file.
        begin: the first byte of the range.
        end: the byte after its last one; None for the end of the file.

    Units:
        bytes.

    Raises:
        OSError: if the file cannot be read.
    """
    hashed = xxhash.xxh3_64()
    with open(file, "rb") as stream:
        last = os.fstat(stream.fileno()).st_size if end is None else end
        room = max(0, last - begin - _CHUNK_BYTES)
        for place in dict.fromkeys(begin + room * number // (_CHUNKS - 1) for number in range(_CHUNKS)):
            stream.seek(place)
            hashed.update(stream.read(min(_CHUNK_BYTES, last - place)))
    return hashed.hexdigest()


def file_stamp(file: str) -> str:
    """Returns a text that is another one after a file was written again; "" if nothing is known of the file.

    A file that was only copied has another one, too. An address of a remote file is asked for what its server says.

    Args:
        file: a path, or an address with a protocol.
    """
    if "://" not in file:
        try:
            facts = os.stat(file)
        except OSError:
            return ""
        return f"{facts.st_size} {facts.st_mtime_ns}"
    # Imported here: only those with remote files need it.
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        system, path = url_to_fs(file)
        info: dict[str, Any] = system.info(path)
    except Exception:  # noqa: BLE001 - of any protocol; the run itself raises it when it reads the file
        return ""
    known = [f"{name} {info[name]}" for name in _REMOTE_FACTS if info.get(name) is not None]
    return "; ".join(known) if len(known) > 1 else ""
