"""Files and folders, read within limits.

Takes paths that a config or a folder of others may name, gives contents and names. Keeps true: what is too large is
refused by its size before it is read, what is no regular file is never opened for good, and a walk ends after a bounded
number of entries, however the folders are made.
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
MAX_RECORD_BYTES = 50_000_000
MAX_ENTRIES = 100_000
_MAX_DEPTH = 60
_CHUNK = 1 << 20


class TooManyEntriesError(OSError):
    """A folder holds more than a walk goes through."""

    def __init__(self, folder: str) -> None:
        super().__init__(errno.E2BIG, f"more than {MAX_ENTRIES:,} entries", folder)


def open_regular(file: str) -> BinaryIO:
    """Opens a file for reading. What is no regular file is refused: a pipe or a device might never end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    stream = open(file, "rb", buffering=0, opener=_opened)  # noqa: SIM115 - the caller closes it
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(errno.EINVAL, "not a regular file", file)


def _opened(file: str, flags: int) -> int:
    # A pipe that nobody writes to would wait here.
    return os.open(file, flags | getattr(os, "O_NONBLOCK", 0))


def read_bytes(file: str, most: int) -> bytes:
    """Returns what a file holds.

    Args:
        file: the file.
        most: bytes that are read; a larger file is refused.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        parts: list[bytes] = []
        total = 0
        # Files of the kernel's own say that they are empty, and one that is written to grows.
        while size <= most and (part := stream.read(_CHUNK)):
            parts.append(part)
            total += len(part)
            size = max(size, total)
    if size > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", file)
    return b"".join(parts)


def read_text(file: str, most: int) -> str:
    """Returns a text in UTF-8 with plain line ends; arguments and errors as for `read_bytes`.

    Raises:
        UnicodeDecodeError: it is no text in UTF-8.
    """
    text = read_bytes(file, most).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def walk_folders(top: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields folders with the names in them, as `os.walk` does; links are not followed.

    Raises:
        TooManyEntriesError: after `MAX_ENTRIES` names.
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
        except OSError:
            continue
        yield here, folders, files
        if depth < _MAX_DEPTH:
            inner = [os.path.join(here, name) for name in reversed(folders)]
            todo += [(folder, depth + 1) for folder in inner if not os.path.islink(folder)]


def matching(pattern: str) -> Iterator[str]:
    """Yields the files that fit a pattern, as `glob.iglob(pattern, recursive=True)` finds them.

    Raises:
        TooManyEntriesError: after `MAX_ENTRIES` names.
    """
    parts = pattern.split(os.sep)
    fixed = next(position for position, part in enumerate(parts) if glob.has_magic(part))
    top = os.sep.join(parts[:fixed]) or (os.sep if pattern.startswith(os.sep) else os.curdir)
    wanted = parts[fixed:]
    for here, folders, files in walk_folders(top):
        inside = [] if here == top else os.path.relpath(here, top).split(os.sep)
        if "**" not in wanted and len(inside) >= len(wanted) - 1:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if _fits([*inside, name], wanted):
                yield os.path.join(here, name) if fixed else os.path.join(*inside, name)


def _fits(parts: list[str], wanted: list[str]) -> bool:
    """Whether a path fits the parts of a pattern; `**` stands for any number of folders."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_fits(parts[skipped:], wanted[1:]) for skipped in range(len(parts) + 1))
    if not parts or (parts[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return re.fullmatch(translate(wanted[0]), parts[0]) is not None and _fits(parts[1:], wanted[1:])
