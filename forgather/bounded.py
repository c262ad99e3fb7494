"""Reads of files and folders, with limits on size and number.

The input is paths that an untrusted config or folder may name; the output is file contents and names. The size of a
file is checked before the file is read, only regular files are read, and a walk ends after a bounded number of entries.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections.abc import Iterator
from fnmatch import translate
from typing import BinaryIO

MAX_CODE_BYTES = 5_000_000
"""Units: bytes. The largest source file that is read."""
MAX_RECORD_BYTES = 50_000_000
"""Units: bytes. The largest run record or cache record that is read."""
MAX_ENTRIES = 100_000
"""The largest number of names that one walk visits."""
_MAX_DEPTH = 60
_CHUNK = 1 << 20


class TooManyEntriesError(OSError):
    """A folder and its subfolders contain more than `MAX_ENTRIES` names."""

    def __init__(self, folder: str) -> None:
        super().__init__(errno.E2BIG, f"more than {MAX_ENTRIES:,} entries", folder)


def open_regular(file: str) -> BinaryIO:
    """Returns a regular file, opened for reading.

    A pipe or a device is refused, because a read might never end.

    Raises:
        OSError: if the file cannot be opened, or is not a regular file.
    """
    stream = open(file, "rb", buffering=0, opener=_open_nonblocking)  # noqa: SIM115 - the caller closes it
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(errno.EINVAL, "not a regular file", file)


def _open_nonblocking(file: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe blocks until another process opens it for writing.
    return os.open(file, flags | getattr(os, "O_NONBLOCK", 0))


def read_bytes(file: str, most: int) -> bytes:
    """Returns the content of a file.

    Args:
        file: the path of the file.
        most: the size limit in bytes; a larger file is refused.

    Raises:
        OSError: if the file cannot be read, is not a regular file, or is larger than the limit.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        parts: list[bytes] = []
        total = 0
        # Files in /proc report size 0, and a file that is being written grows, so the size is checked while reading,
        # too.
        while size <= most and (part := stream.read(_CHUNK)):
            parts.append(part)
            total += len(part)
            size = max(size, total)
    if size > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", file)
    return b"".join(parts)


def read_text(file: str, most: int) -> str:
    """Returns the text of a UTF-8 file, with `\\n` line ends.

    Args:
        file: the path of the file.
        most: the size limit in bytes; a larger file is refused.

    Raises:
        OSError: if the file cannot be read, is not a regular file, or is larger than the limit.
        UnicodeDecodeError: if the content is not UTF-8.
    """
    text = read_bytes(file, most).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def walk_folders(top: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields each folder with its subfolders and files, as `os.walk` does; symbolic links are not followed.

    The caller may remove names from the list of subfolders; these subfolders are then skipped.

    Raises:
        TooManyEntriesError: if the walk finds more than `MAX_ENTRIES` names.
    """
    count, todo = 0, [(top, 0)]
    while todo:
        here, depth = todo.pop()
        folders: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    count += 1
                    if count > MAX_ENTRIES:
                        raise TooManyEntriesError(top)
                    (folders if entry.is_dir() else files).append(entry.name)
        except TooManyEntriesError:
            raise
        # As in `os.walk`, a folder that cannot be read is left out.
        except OSError:
            continue
        yield here, folders, files
        if depth < _MAX_DEPTH:
            # The caller has removed the folders that it does not want from the list by now.
            inner = [os.path.join(here, name) for name in reversed(folders)]
            todo += [(folder, depth + 1) for folder in inner if not os.path.islink(folder)]


def matching_files(pattern: str) -> Iterator[str]:
    """Yields the files that match a pattern, as `glob.iglob(pattern, recursive=True)` does.

    Raises:
        TooManyEntriesError: if the search visits more than `MAX_ENTRIES` names.
    """
    parts = pattern.split(os.sep)
    # The walk starts at the last folder before a wildcard: from further up it could reach the limit in unrelated
    # folders.
    fixed = next(position for position, part in enumerate(parts) if glob.has_magic(part))
    top = os.sep.join(parts[:fixed]) or (os.sep if pattern.startswith(os.sep) else os.curdir)
    wanted = parts[fixed:]
    for here, folders, files in walk_folders(top):
        inside = [] if here == top else os.path.relpath(here, top).split(os.sep)
        # Deeper folders cannot match, so the walk need not visit them.
        if "**" not in wanted and len(inside) >= len(wanted) - 1:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if _fits([*inside, name], wanted):
                yield os.path.join(here, name) if fixed else os.path.join(*inside, name)


def _fits(parts: list[str], wanted: list[str]) -> bool:
    """Returns whether the parts of a path match the parts of a pattern; `**` matches any number of folders."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_fits(parts[skipped:], wanted[1:]) for skipped in range(len(parts) + 1))
    if not parts or (parts[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return re.fullmatch(translate(wanted[0]), parts[0]) is not None and _fits(parts[1:], wanted[1:])
