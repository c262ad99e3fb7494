"""Checkpoint folders `checkpoint-<step>`: drafts, the atomic commit, removal, and cleanup after crashed processes.

Takes an output folder and a storage; gives drafts that processes fill, and the final folder. Files are written into a
hidden draft folder and synced, the manifest is written last, and then the draft is renamed. A crash or a power failure
at any point leaves either the complete checkpoint or none. An existing checkpoint of the same step stays until the new
one can take its place. A folder of that name without a manifest is renamed, not removed.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.manifest import MANIFEST, FileFact, Manifest, check_complete, is_regular
from forgather.ml.checkpoint.storage import Bytes, LocalStorage, Storage, make_folders, remove_tree, write_file

# The standard logger, not the rank-aware one, which imports torch: only the main process commits a checkpoint.
_log = logging.getLogger(__name__)

_PREFIX = "checkpoint-"
_NAME = re.compile(r"checkpoint-(\d+)\Z")
_TEMPORARY = re.compile(r"\.(saving|replaced|removed)-(checkpoint-\d+)-([\w.-]+)\Z")
_DAY_SECONDS, _STILL_SECONDS = 86400.0, 60.0
_CHUNK_BYTES = 8 << 20
_MIN_THREAD_BYTES = 1 << 20
_MAX_PENDING = 4


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Returns the path of the checkpoint of an optimizer step.

    Args:
        output_dir: the folder that contains the checkpoints.
        step: optimizer steps that were done.
    """
    return output_dir / f"{_PREFIX}{step}"


def step_of(folder: Path) -> int:
    """Returns the step in the name of a checkpoint folder; -1 for any other name."""
    match = _NAME.match(folder.name)
    return -1 if match is None else int(match[1])


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) for every checkpoint folder, in the order of steps; contents are not looked at."""
    if not output_dir.is_dir():
        return []
    named = ((_NAME.match(folder.name), folder) for folder in output_dir.iterdir() if folder.is_dir())
    return sorted((int(match[1]), folder) for match, folder in named if match)


class Draft:
    """A checkpoint folder that is being filled; each process writes files of its own.

    Attributes:
        files: size and digest of each file that this process wrote, by path within the folder.

    Args:
        storage: makes the changes.
        folder: an existing, empty folder.
    """

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage = storage
        self.folder = folder
        self.files: dict[str, FileFact] = {}

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Writes and syncs a file; its digest is computed at the same time.

        Args:
            name: path within the folder; missing parent folders are created.
            chunks: the content, in order.

        Raises:
            OSError: the file system refuses.
        """
        file = self.folder / name
        make_folders(self.storage, file.parent)
        hashed = _Hashed(chunks)
        write_file(self.storage, file, hashed)
        self.files[name] = hashed.fact


class _Hashed:
    """The chunks of a file; size and digest are known after the last chunk was consumed."""

    def __init__(self, chunks: Iterable[Bytes]) -> None:
        self._chunks = chunks
        self._hasher = xxhash.xxh3_128()
        self._size = 0

    def __iter__(self) -> Iterator[Bytes]:
        hashing: deque[Future[None]] = deque()
        with ThreadPoolExecutor(1) as executor:  # the thread is started by the first `submit`
            for piece in self._pieces():
                self._size += len(piece)
                # Hashing and writing both release the GIL, so a thread lets them overlap; small files do not pay for a
                # thread.
                if hashing or len(piece) >= _MIN_THREAD_BYTES:
                    hashing.append(executor.submit(self._hasher.update, piece))
                else:
                    self._hasher.update(piece)
                yield piece
                # Bounds the pieces that are alive: the writer may be faster than the hash.
                if len(hashing) > _MAX_PENDING:
                    hashing.popleft().result()
            for last in hashing:
                last.result()

    def _pieces(self) -> Iterator[Bytes]:
        for chunk in self._chunks:
            # `cast` because `len` of a memoryview counts elements, not bytes.
            whole = memoryview(chunk).cast("B")
            for start in range(0, len(whole), _CHUNK_BYTES):
                yield whole[start : start + _CHUNK_BYTES]

    @property
    def fact(self) -> FileFact:
        return FileFact(self._size, self._hasher.hexdigest())


def begin_draft(storage: Storage, output_dir: Path, step: int) -> Draft:
    """Returns an empty draft; leftovers of crashed processes are removed first.

    Args:
        storage: makes the changes.
        output_dir: the folder that contains the checkpoints.
        step: of the checkpoint.

    Raises:
        OSError: the file system refuses, or a file has the checkpoint's name.
    """
    remove_leftovers(storage, output_dir)
    make_folders(storage, output_dir)
    # Refused before the draft is written: minutes of work would otherwise end in a rename that fails.
    final = checkpoint_folder(output_dir, step)
    if os.path.lexists(final) and not final.is_dir():
        raise FileExistsError(errno.EEXIST, "a file has that name")  # a user's file is never removed
    folder = output_dir / f".saving-{_PREFIX}{step}-{process_mark()}"
    storage.make_folder(folder)
    return Draft(storage, folder)


def finish_draft(
    storage: Storage, folder: Path, step: int, files: Mapping[str, FileFact], facts: Mapping[str, Any]
) -> Path:
    """Commits a draft and returns the folder of the checkpoint.

    Args:
        storage: makes the changes.
        folder: of the draft; every process has written and synced its files.
        step: of the checkpoint; an existing one of the same step is replaced.
        files: size and digest of each file, of all processes.
        facts: further entries of the manifest, see `Manifest`.

    Raises:
        CheckpointError: FG603 or FG604 when a file is not as it was written; the draft is not committed.
        OSError: the file system refuses.
    """
    # Every name must be durable before the rename: after a power failure a committed checkpoint has all of its files.
    for inner in sorted({(folder / name).parent for name in files} - {folder}):
        storage.sync_folder(inner)
    write_file(storage, folder / MANIFEST, [Manifest(step, files, facts).to_bytes()])
    storage.sync_folder(folder)
    check_complete(folder)  # network storage can lose data without reporting an error
    final = checkpoint_folder(folder.parent, step)
    _commit(storage, folder, final)
    # Readers recognize a checkpoint by its manifest; a storage that only pretends to rename is found here.
    if not is_regular(final / MANIFEST):
        raise FileNotFoundError(errno.ENOENT, "the storage did not rename it")
    return final


def _commit(storage: Storage, draft: Path, final: Path) -> None:
    # Without a manifest it is not one of our checkpoints, for example a folder that a user has copied there.
    if final.exists() and not os.path.lexists(final / MANIFEST):
        _put_aside(storage, final)
    if not final.exists():
        storage.rename(draft, final)
        storage.sync_folder(final.parent)
        return
    # A non-empty folder cannot be replaced by a rename. Between the two renames below no checkpoint has the name; the
    # older one gets it back here, or by `restore_replaced` in a later process when this one dies.
    replaced = final.with_name(f".replaced-{final.name}-{process_mark()}")
    storage.rename(final, replaced)
    try:
        storage.rename(draft, final)
    except BaseException:
        storage.rename(replaced, final)
        raise
    storage.sync_folder(final.parent)
    with suppress(OSError):  # the next save removes what is left
        remove_tree(storage, replaced)


def _put_aside(storage: Storage, folder: Path) -> None:
    """Renames a folder that has a checkpoint's name and no manifest: a user put it there, so it is not removed."""
    # An earlier run may have used the first name already.
    names = (folder.with_name(f"{folder.name}.aside{number or ''}") for number in itertools.count())
    aside = next(name for name in names if not os.path.lexists(name))
    storage.rename(folder, aside)
    storage.sync_folder(folder.parent)
    _log.warning("%s is not a checkpoint and has the name of one: it was renamed to %s", folder, aside.name)


def discard_draft(draft: Draft) -> None:
    """Removes a draft that was not committed; does nothing for a committed one."""
    with suppress(OSError):  # the next save removes what is left
        if draft.folder.exists():
            remove_tree(draft.storage, draft.folder)


@contextmanager
def checkpoint_write_errors(output_dir: Path, step: int) -> Iterator[None]:
    """Context manager that converts an OSError into an error that names the checkpoint.

    Args:
        output_dir: the folder that contains the checkpoints.
        step: of the checkpoint.

    Raises:
        CheckpointError: FG609 when the file system refuses; earlier checkpoints are untouched.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {str(checkpoint_folder(output_dir, step))!r}: "
            f"{error.strerror or error}",
            code="FG609",
            hint="free space or change output_dir; earlier checkpoints are untouched",
        ) from error


def write_checkpoint(
    output_dir: Path,
    step: int,
    fill: Callable[[Draft], None],
    *,
    facts: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> Path:
    """Writes a complete checkpoint from a single process and returns its folder.

    Args:
        output_dir: the folder that contains the checkpoints.
        step: of the checkpoint; an existing one of the same step is replaced.
        fill: writes the files into a draft.
        facts: further entries of the manifest, see `Manifest`.
        storage: makes the changes; the file system by default.

    Raises:
        CheckpointError: FG609 when the file system refuses; earlier checkpoints are untouched.
    """
    storage = storage or LocalStorage()
    with checkpoint_write_errors(output_dir, step):
        draft = begin_draft(storage, output_dir, step)
        try:
            fill(draft)
            return finish_draft(storage, draft.folder, step, draft.files, facts or {})
        finally:
            discard_draft(draft)


def discard_folder(storage: Storage, folder: Path) -> None:
    """Removes a checkpoint; it is durably renamed to a hidden name before its first file is removed.

    Args:
        storage: makes the changes.
        folder: of the checkpoint.

    Raises:
        OSError: the file system refuses the rename.
    """
    hidden = folder.with_name(f".removed-{folder.name}-{process_mark()}")
    storage.rename(folder, hidden)
    storage.sync_folder(folder.parent)
    with suppress(OSError):  # the next save removes what is left
        remove_tree(storage, hidden)


def remove_leftovers(storage: Storage, output_dir: Path) -> None:
    """Removes the leftovers of crashed processes, and restores a checkpoint whose replacement was interrupted.

    Args:
        storage: makes the changes.
        output_dir: the folder that contains the checkpoints.
    """
    # First: a half-replaced checkpoint is a leftover too, and may be the only good one.
    restore_replaced(storage, output_dir)
    for folder, _ in _leftovers(output_dir):
        with suppress(OSError):
            remove_tree(storage, folder)


def restore_replaced(storage: Storage, output_dir: Path) -> None:
    """Renames checkpoints back whose replacement was interrupted by a crash.

    Args:
        storage: makes the changes.
        output_dir: the folder that contains the checkpoints.
    """
    for folder, final in interrupted_replacements(output_dir):
        storage.rename(folder, final)
        storage.sync_folder(output_dir)


def interrupted_replacements(output_dir: Path) -> list[tuple[Path, Path]]:
    """Returns (current folder, original folder) of each checkpoint whose replacement was interrupted by a crash."""
    found = _leftovers(output_dir, still_seconds=_STILL_SECONDS)
    # Only folders whose owner has been inactive for a minute: the owner may be between its two renames.
    replaced = [(folder, output_dir / match[2]) for folder, match in found if match[1] == "replaced"]
    return [(folder, final) for folder, final in replaced if not final.exists()]


def _leftovers(output_dir: Path, *, still_seconds: float = _DAY_SECONDS) -> list[tuple[Path, re.Match[str]]]:
    folders = sorted(output_dir.iterdir()) if output_dir.is_dir() else []
    named = [(folder, _TEMPORARY.match(folder.name)) for folder in folders]
    left = [(folder, match) for folder, match in named if match is not None]
    return [(folder, match) for folder, match in left if is_abandoned(folder, match[3], still_seconds=still_seconds)]


def process_mark() -> str:
    """Returns a mark that identifies this process: its id, its start time and its host.

    The start time distinguishes it from a later process with the same id.
    """
    return f"{os.getpid()}.{_started(os.getpid())}.{_own_host()}"


@functools.cache
def _own_host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname()) or "unnamed"


def is_abandoned(folder: Path, mark: str, *, still_seconds: float = _DAY_SECONDS) -> bool:
    """Returns True when the process that owns a draft or hidden folder is gone.

    Args:
        folder: a draft or hidden folder.
        mark: of the process that owns it, from `process_mark`.
        still_seconds: for a process of another host, the folder must not have changed for so long. Whether that process
            is alive cannot be found out on a shared file system.
    """
    # Marks of older versions have no host; they are taken for marks of this one.
    host = mark.split(".", 2)[2] if mark.count(".") > 1 else _own_host()
    if host == _own_host():
        return not is_running(mark)
    try:
        changed = max(file.lstat().st_ctime for file in (folder, *folder.rglob("*")))
    except OSError:  # a file vanished during the walk, so a process is changing the folder
        return False
    return time.time() - changed > still_seconds


def is_running(mark: str) -> bool:
    """Returns True when the process that made a mark on this host is running, and is not this process."""
    number, _, rest = mark.partition(".")
    started = rest.partition(".")[0]
    # A mark with the own id is a leftover: an earlier process, often in a container, had the same id.
    if not number.isdecimal() or int(number) == os.getpid():
        return False
    process = int(number)
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    # After a reboot or in a new container the same id soon belongs to another process.
    return not started.isdecimal() or int(started) == _started(process)


def _started(process: int) -> int:
    """Returns the start time of a process in clock ticks since boot; 0 when /proc does not have it."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The second field, the command name, may itself contain blanks and parentheses; fields count from the last one.
    return int(facts.rpartition(")")[2].split()[19])
