"""Replaces a file in one step: a reader sees the whole old content or the whole new one, and a full disk costs nothing.

The input is a path and the new content. Only a process that is killed meanwhile leaves a hidden draft in the folder.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress


def replace_file(file: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file that all users may read, or replaces it.

    Args:
        file: the path of the file, in a folder that exists.
        content: the new content.

    Raises:
        OSError: if it cannot be written; the old file stays as it is.
    """
    folder, name = os.path.split(os.fspath(file))
    descriptor, draft = tempfile.mkstemp(dir=folder or os.curdir, prefix=f".{name}-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        os.chmod(draft, 0o644)
        os.replace(draft, file)
    except BaseException:
        with suppress(OSError):
            os.remove(draft)
        raise
