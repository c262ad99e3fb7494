"""The places of control sockets: a folder of this user for each run, and those that killed runs have left behind.

The input is the environment; the output is folders. A run that ends removes its own folder. One that is killed cannot,
so the next run, and `fgcli runs`, remove what no process listens to.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress

NAME = "control.sock"
_YOUNG_SECONDS = 60.0
"""Units: seconds. The age up to which a socket is left alone: its run may be about to listen."""


def socket_parents() -> list[str]:
    """Returns the folders in which a run makes a folder for its socket, the best first."""
    parents = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")
    return list(dict.fromkeys(parent for parent in parents if parent and os.path.isabs(parent)))


def make_socket_folder(parent: str) -> str:
    """Returns a new folder for a socket, which only this user can enter.

    Args:
        parent: one of `socket_parents`.

    Raises:
        OSError: if it cannot be made.
    """
    # mkdtemp makes a folder of mode 0700 that did not exist: nobody else can have put a socket there.
    return tempfile.mkdtemp(prefix=_prefix(), dir=parent)


def remove_dead_sockets() -> None:
    """Removes the sockets of this user on this machine that no process listens to, with their folders."""
    for folder in _own_folders():
        path = os.path.join(folder, NAME)
        with suppress(OSError):
            found = os.lstat(path)
            if stat.S_ISSOCK(found.st_mode) and time.time() - found.st_mtime > _YOUNG_SECONDS and _is_dead(path):
                os.unlink(path)
                os.rmdir(folder)


def _own_folders() -> Iterator[str]:
    for parent in socket_parents():
        with suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                # Others may write to the folder of temporary files, and lay a link there.
                if entry.name.startswith(_prefix()) and entry.is_dir(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_uid == os.getuid() and not found.st_mode & 0o077:
                        yield entry.path


def _prefix() -> str:
    # Machines may share a folder of temporary files, and a socket of another one looks dead from here.
    return f"forgather-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"


def _is_dead(path: str) -> bool:
    import socket  # a late import: a list of runs most often finds no socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # such as one whose queue is full
        return False
