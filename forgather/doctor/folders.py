"""Checks of folders: whether they can be written to as a run writes to them, and on which file system they are.

A run writes a file, renames it over another one, flushes it to the disk, and locks it. On network file systems, each of
these may be missing.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory

from forgather.doctor.result import CheckResult, note, ok, wrong

_NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "beegfs",
    "gpfs",
    "cifs",
    "smb3",
    "ceph",
    "glusterfs",
    "fuse.glusterfs",
    "9p",
    "afs",
)
_LEAST_FREE = 2**30
# Where libraries write what they find again: downloaded models, compiled kernels.
_CACHES = (
    ("HF_HOME", "~/.cache/huggingface"),
    ("TRITON_CACHE_DIR", "~/.triton/cache"),
    ("TORCHINDUCTOR_CACHE_DIR", "/tmp"),
    ("XDG_CACHE_HOME", "~/.cache"),
)


def existing_parent(folder: str) -> str:
    """Returns a folder, or the nearest one above it that exists."""
    path = os.path.abspath(folder)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def check_folder(folder: str) -> CheckResult:
    """Checks that a folder, or the nearest one above it that exists, can be used for runs.

    Args:
        folder: the folder.
    """
    name = "run folder"
    here, path = existing_parent(folder), os.path.abspath(folder)
    while path != here:
        if os.path.lexists(path):
            return wrong(name, f"{path} is no folder", "set output_dir to a folder")
        path = os.path.dirname(path)
    step = "written to"
    try:
        with TemporaryDirectory(dir=here, prefix=".forgather-doctor-") as inside:
            step = "flushed (fsync)"
            _write(os.path.join(inside, "a"))
            step = "renamed over another file"
            _write(os.path.join(inside, "b"))
            os.replace(os.path.join(inside, "a"), os.path.join(inside, "b"))
            step = "locked (flock)"
            _lock(os.path.join(inside, "b"))
    except OSError as error:
        reason = error.strerror or str(error)
        return wrong(name, f"{here} cannot be {step}: {reason}", "write runs to another folder: set output_dir")
    facts = os.statvfs(here)
    free = facts.f_bavail * facts.f_frsize
    if free < _LEAST_FREE:
        fix = "remove old checkpoints (fgcli ckpt prune), or set output_dir"
        return wrong(name, f"{here} has {free / 2**20:.0f} MiB free", fix, free_bytes=free)
    return ok(name, f"{here}: written, flushed, renamed, locked; {free / 2**30:.0f} GiB free", free_bytes=free)


def _write(file: str) -> None:
    with open(file, "w", encoding="ascii") as stream:
        stream.write("x")
        stream.flush()
        os.fsync(stream.fileno())


def _lock(file: str) -> None:
    with open(file, "r+", encoding="ascii") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(stream, fcntl.LOCK_UN)


def check_file_system(folder: str, *, is_alone: bool = True, mounts: str = "/proc/self/mountinfo") -> CheckResult:
    """Says on which file system a folder is, and whether other machines can see it.

    Args:
        folder: the folder.
        is_alone: whether the run has one machine.
        mounts: the file that lists the mounted file systems.
    """
    name = "file system"
    kind, place, options = _mount_of(existing_parent(folder), mounts)
    found = f"{kind} at {place}"
    if kind.startswith("nfs") and "nolock" in options.split(","):
        return wrong(
            name, f"{found} is mounted with nolock: machines do not see each other's locks", "mount it without nolock"
        )
    if kind in _NETWORK:
        return ok(name, f"{found}, a network file system")
    if is_alone:
        return ok(name, found)
    return note(name, f"{found}, which is not known to be shared", "the check of the shared folder decides")


def _mount_of(folder: str, mounts: str) -> tuple[str, str, str]:
    """Returns the kind, the mount point and the options of the file system of a folder."""
    best = ("unknown", "/", "")
    real = os.path.realpath(folder)
    with open(mounts, encoding="utf-8") as stream:
        for line in stream:
            before, _, after = line.partition(" - ")
            fields, kinds = before.split(), after.split()
            # Spaces in a mount point are written as \\040.
            place = fields[4].replace("\\040", " ")
            is_above = real == place or real.startswith(os.path.join(place, ""))
            # Of mounts at the same place, the last one is seen.
            if is_above and len(place) >= len(best[1]):
                best = (kinds[0], place, f"{fields[5]},{kinds[-1]}")
    return best


def check_caches(environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Checks that the folders in which libraries keep downloads and compiled code can be written to.

    Args:
        environ: the environment variables.
    """
    for variable, default in _CACHES:
        folder = os.path.expanduser(environ.get(variable) or default)
        here = existing_parent(folder)
        try:
            with TemporaryDirectory(dir=here):
                yield ok("cache", f"{variable}: {folder}")
        except OSError as error:
            found = f"{variable}: {folder} cannot be written to: {error.strerror or error}"
            yield wrong("cache", found, f"export {variable}=FOLDER, with a folder of yours")
