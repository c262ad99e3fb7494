"""Every change to the folders of checkpoints and models.

Takes paths; gives files that are open for writing, and names that change. Keeps true: nothing else of the package
creates, writes, syncs, renames or removes a file or a folder there, so that whoever wraps a `Storage` sees every one of
these acts; files get the mode that the umask leaves them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

Bytes = bytes | memoryview


class WritableFile(Protocol):
    """A file that is being written from its beginning to its end."""

    def write(self, data: Bytes) -> None:
        """Appends all of the bytes."""
        ...

    def sync(self) -> None:
        """Returns once what was written survives a loss of power."""
        ...

    def close(self) -> None:
        """Gives the file back; it may be called more than once."""
        ...


class Storage(Protocol):
    """The acts that change a folder. Each raises OSError where it cannot be done."""

    def create(self, file: Path) -> WritableFile:
        """Opens a file for writing; what it held before is gone."""
        ...

    def make_folder(self, folder: Path) -> None:
        """Makes a folder in one that exists; raises FileExistsError where something has its name."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file or a folder another name, as one act; it replaces a file or an empty folder."""
        ...

    def remove_file(self, file: Path) -> None:
        """Removes a file."""
        ...

    def remove_folder(self, folder: Path) -> None:
        """Removes an empty folder."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Returns once the names in a folder survive a loss of power."""
        ...

    def free_bytes(self, folder: Path) -> int | None:
        """Returns how much can still be written into an existing folder; None where nobody knows."""
        ...


class LocalFile:
    """A file of the operating system, without a buffer."""

    def __init__(self, file: Path) -> None:
        self._handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, data: Bytes) -> None:
        """Appends all of the bytes."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._handle, left) :]

    def sync(self) -> None:
        """Returns once what was written survives a loss of power."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Gives the file back."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)


class LocalStorage:
    """The file system."""

    def create(self, file: Path) -> LocalFile:
        """Opens a file for writing; what it held before is gone."""
        return LocalFile(file)

    def make_folder(self, folder: Path) -> None:
        """Makes a folder in one that exists."""
        os.mkdir(folder)

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file or a folder another name, as one act."""
        os.replace(old, new)

    def remove_file(self, file: Path) -> None:
        """Removes a file."""
        os.unlink(file)

    def remove_folder(self, folder: Path) -> None:
        """Removes an empty folder."""
        os.rmdir(folder)

    def sync_folder(self, folder: Path) -> None:
        """Returns once the names in a folder survive a loss of power."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def free_bytes(self, folder: Path) -> int | None:
        """Returns how much a user without special rights can still write."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


def make_folders(storage: Storage, folder: Path) -> None:
    """Makes a folder and those above it that are missing, each under a name that survives a loss of power."""
    if folder.is_dir():
        return
    make_folders(storage, folder.parent)
    try:
        storage.make_folder(folder)
    except FileExistsError:
        if not folder.is_dir():  # another process may have made it meanwhile
            raise
    storage.sync_folder(folder.parent)


def remove_tree(storage: Storage, folder: Path) -> None:
    """Removes a folder with what is in it; of a link, the link alone."""
    if folder.is_symlink():
        storage.remove_file(folder)
        return
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(storage, entry)
        else:
            storage.remove_file(entry)
    storage.remove_folder(folder)


def write_file(storage: Storage, file: Path, chunks: Iterable[Bytes]) -> None:
    """Writes a file that survives a loss of power, but for its name: that is the folder's."""
    stream = storage.create(file)
    try:
        for chunk in chunks:
            stream.write(chunk)
        stream.sync()
    finally:
        stream.close()
