"""Replaces a file in one step: a reader sees the whole old content or the whole new one, and a full disk costs nothing.

The input is a path and the new content. Only a process that is killed meanwhile leaves a hidden draft in the folder.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress


def replace_file(file: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file that all users may read, or replaces a file and keeps its mode.

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
        os.chmod(draft, _mode_of(file))
        os.replace(draft, file)
    except BaseException:
        with suppress(OSError):
            os.remove(draft)
        raise


def write_whole(file: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file that a user named. An earlier one stays as it is if the new content cannot be written whole.

    A pipe, a device, a file of another user and one with several hard links are written in place, because replacing
    them would change more than their content.

    Args:
        file: the path of the file, in a folder that exists.
        content: the new content.

    Raises:
        OSError: if it cannot be written.
    """
    place = os.path.realpath(file)
    if _is_replaceable(place):
        replace_file(place, content)
        return
    with open(file, "wb") as stream:
        stream.write(content)


def _is_replaceable(place: str) -> bool:
    if not os.path.isfile(place):
        return False
    facts = os.stat(place)
    # A new file in the folder would also replace a file that may not be written.
    may_write = os.access(place, os.W_OK) and os.access(os.path.dirname(place), os.W_OK)
    return may_write and facts.st_uid == os.geteuid() and facts.st_nlink == 1


def _mode_of(file: str | os.PathLike[str]) -> int:
    with suppress(OSError):
        return stat.S_IMODE(os.stat(file).st_mode)
    return 0o644
