"""Storage: all operations that change checkpoint folders and model folders.

No other module of the package creates, writes, syncs, renames or removes files in these folders. A class that wraps a
`Storage` therefore sees every change, and tests can let each operation fail. The umask determines the permissions of
new files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

Bytes = bytes | memoryview


class WritableFile(Protocol):
    """The protocol of a file that is written sequentially from the start to the end."""

    def write(self, data: Bytes) -> None:
        """Appends all given bytes to the file.

        Raises:
            OSError: if the bytes cannot be written.
        """
        ...

    def sync(self) -> None:
        """Waits until all written bytes are on stable storage, so that they survive a power failure.

        Raises:
            OSError: if the file cannot be synced.
        """
        ...

    def close(self) -> None:
        """Closes the file. The method may be called more than once."""
        ...


class Storage(Protocol):
    """The protocol of an object through which all changes of checkpoint folders and model folders are made.

    Raises:
        OSError: raised by each method if the operation fails.
    """

    def create(self, file: Path) -> WritableFile:
        """Opens a file for writing and truncates it."""
        ...

    def make_folder(self, folder: Path) -> None:
        """Creates a folder inside an existing folder.

        Raises:
            FileExistsError: if a file or folder of this name exists.
        """
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file or folder atomically, and replaces an existing file or empty folder of the new name.

        Args:
            old: the current path.
            new: the new path, on the same file system.
        """
        ...

    def remove_file(self, file: Path) -> None:
        """Removes a file."""
        ...

    def remove_folder(self, folder: Path) -> None:
        """Removes an empty folder."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Waits until the names of all entries of a folder are on stable storage and survive a power failure."""
        ...

    def free_bytes(self, folder: Path) -> int | None:
        """Returns the free disk space for files in an existing folder, in bytes; None if it is unknown."""
        ...


class LocalFile:
    """A file of the local file system that is written without a user-space buffer."""

    def __init__(self, file: Path) -> None:
        # Without a buffer, an error of the disk is raised by the write that caused it and not by a later flush.
        self._handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, data: Bytes) -> None:
        """Appends all given bytes to the file."""
        # `os.write` may write less than it is given, for example 2 GiB at most on Linux.
        left = memoryview(data)
        while left:
            left = left[os.write(self._handle, left) :]

    def sync(self) -> None:
        """Waits until all written bytes are on stable storage, so that they survive a power failure."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Closes the file. Further calls do nothing."""
        if self._handle >= 0:
            # Reset first: a second close of the number could hit a file that another thread has opened since.
            handle, self._handle = self._handle, -1
            os.close(handle)


class LocalStorage:
    """A `Storage` for the local file system, including mounted network file systems."""

    def create(self, file: Path) -> LocalFile:
        """Opens a file for writing and truncates it."""
        return LocalFile(file)

    def make_folder(self, folder: Path) -> None:
        """Creates a folder inside an existing folder."""
        os.mkdir(folder)

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file or folder atomically, and replaces an existing file or empty folder of the new name.

        Args:
            old: the current path.
            new: the new path, on the same file system.
        """
        os.replace(old, new)

    def remove_file(self, file: Path) -> None:
        """Removes a file."""
        os.unlink(file)

    def remove_folder(self, folder: Path) -> None:
        """Removes an empty folder."""
        os.rmdir(folder)

    def sync_folder(self, folder: Path) -> None:
        """Waits until the names of all entries of a folder are on stable storage and survive a power failure."""
        # On POSIX, syncing a file does not sync its name: the folder that contains it needs an fsync of its own.
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def free_bytes(self, folder: Path) -> int | None:
        """Returns the number of bytes that an unprivileged user can still write."""
        found = os.statvfs(folder)
        # `f_bavail`, not `f_bfree`: the latter includes blocks that are reserved for root.
        return found.f_bavail * found.f_frsize


def make_folders(storage: Storage, folder: Path) -> None:
    """Creates a folder and its missing parents, and syncs their names, so that they survive a power failure.

    Args:
        storage: the object through which folders are created.
        folder: the folder to create.
    """
    if folder.is_dir():
        return
    # Parents first, so that each new name is synced in a parent that is durable itself.
    make_folders(storage, folder.parent)
    try:
        storage.make_folder(folder)
    except FileExistsError:
        if not folder.is_dir():  # another process may have made it meanwhile
            raise
    storage.sync_folder(folder.parent)


def remove_tree(storage: Storage, folder: Path) -> None:
    """Removes a folder and its content. If the path is a symbolic link, only the link is removed.

    Args:
        storage: the object through which files are removed.
        folder: the folder to remove.
    """
    if folder.is_symlink():
        storage.remove_file(folder)
        return
    # Sorted, so that a test can refuse the n-th operation and meet the same file each time.
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(storage, entry)
        else:
            storage.remove_file(entry)
    storage.remove_folder(folder)


def write_file(storage: Storage, file: Path, chunks: Iterable[Bytes]) -> None:
    """Writes and syncs a file. The file's name survives a power failure only after `sync_folder` of the file's folder.

    Args:
        storage: the object through which the file is written.
        file: the path of the file.
        chunks: the content of the file, in order.
    """
    # Closed in any case: a full disk must not leave an open file for each save that was tried.
    stream = storage.create(file)
    try:
        for chunk in chunks:
            stream.write(chunk)
        stream.sync()
    finally:
        stream.close()
