"""Checkpoint folders `checkpoint-<step>`: drafts, the atomic commit, removal, and cleanup after crashed processes.

Every process writes its files into a hidden draft folder and syncs them. Then the manifest is written, and the draft is
renamed to its final name. A crash or a power failure at any point leaves either the complete checkpoint or none. An
existing checkpoint of the same step is kept until the new one is complete. A folder that has the name of the new
checkpoint and no manifest may belong to the user, so the folder is renamed and not removed.
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
    """Returns the path of the checkpoint folder of an optimizer step.

    Args:
        output_dir: the folder that contains the checkpoints.
        step: the number of optimizer steps that were done.
    """
    return output_dir / f"{_PREFIX}{step}"


def step_of(folder: Path) -> int:
    """Returns the step in the name of a checkpoint folder; -1 if the folder has any other name."""
    match = _NAME.match(folder.name)
    return -1 if match is None else int(match[1])


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) for every checkpoint folder, sorted by step. The content of the folders is not read."""
    if not output_dir.is_dir():
        return []
    named = ((_NAME.match(folder.name), folder) for folder in output_dir.iterdir() if folder.is_dir())
    return sorted((int(match[1]), folder) for match, folder in named if match)


class Draft:
    """A checkpoint folder that is not complete yet; several processes can write different files into it.

    Attributes:
        files: the size and digest of each file that this process wrote, by path within the folder.

    Args:
        storage: the object through which files are written and removed.
        folder: the path of an existing, empty folder.
    """

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage = storage
        self.folder = folder
        self.files: dict[str, FileFact] = {}

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Writes and syncs a file, and computes its digest while writing.

        Args:
            name: the path of the file within the folder; missing parent folders are created.
            chunks: the content of the file, in order.

        Raises:
            OSError: if the file cannot be written.
        """
        file = self.folder / name
        make_folders(self.storage, file.parent)
        hashed = _Hashed(chunks)
        write_file(self.storage, file, hashed)
        self.files[name] = hashed.fact


class _Hashed:
    """An iterable over the chunks of a file that computes the size and digest of the file during the iteration."""

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
    """Removes the drafts and hidden folders of crashed processes, and returns a new, empty draft.

    Args:
        storage: the object through which files are written and removed.
        output_dir: the folder that contains the checkpoints.
        step: the step of the checkpoint.

    Raises:
        OSError: if the folder cannot be created, or if a file has the name of the checkpoint.
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
        storage: the object through which files are written and removed.
        folder: the folder of the draft, into which every process has written and synced its files.
        step: the step of the checkpoint. An existing checkpoint of the same step is replaced.
        files: the size and digest of each file that any process wrote.
        facts: further entries of the manifest, see `Manifest`.

    Raises:
        CheckpointError: FG603 if a file has another size than was written, FG604 if a file is missing. The draft is
            then not committed.
        OSError: if a file or folder cannot be written or renamed.
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
    """Renames a folder that has the name of a checkpoint and no manifest: it may belong to the user."""
    # An earlier run may have used the first name already.
    names = (folder.with_name(f"{folder.name}.aside{number or ''}") for number in itertools.count())
    aside = next(name for name in names if not os.path.lexists(name))
    storage.rename(folder, aside)
    storage.sync_folder(folder.parent)
    _log.warning("%s is not a checkpoint and has the name of one: it was renamed to %s", folder, aside.name)


def discard_draft(draft: Draft) -> None:
    """Removes a draft that was not committed; does nothing if the draft was committed."""
    with suppress(OSError):  # the next save removes what is left
        if draft.folder.exists():
            remove_tree(draft.storage, draft.folder)


@contextmanager
def checkpoint_write_errors(output_dir: Path, step: int) -> Iterator[None]:
    """Context manager that converts an OSError of its body into an error that names the checkpoint.

    Args:
        output_dir: the folder that contains the checkpoints.
        step: the step of the checkpoint.

    Raises:
        CheckpointError: FG609 if the body raises an OSError.
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
    """Writes a complete checkpoint from a single process, and returns its folder.

    Args:
        output_dir: the folder that contains the checkpoints.
        step: the step of the checkpoint. An existing checkpoint of the same step is replaced.
        fill: a function that writes all files into the draft that it gets.
        facts: further entries of the manifest, see `Manifest`.
        storage: the object through which files are written and removed; the local file system by default.

    Raises:
        CheckpointError: FG609 if a file cannot be written. Earlier checkpoints do not change.
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
    """Renames a checkpoint to a hidden name, and then removes it, so that a crash leaves no incomplete checkpoint.

    Args:
        storage: the object through which files are written and removed.
        folder: the folder of the checkpoint.

    Raises:
        OSError: if the folder cannot be renamed.
    """
    hidden = folder.with_name(f".removed-{folder.name}-{process_mark()}")
    storage.rename(folder, hidden)
    storage.sync_folder(folder.parent)
    with suppress(OSError):  # the next save removes what is left
        remove_tree(storage, hidden)


def remove_leftovers(storage: Storage, output_dir: Path) -> None:
    """Removes the drafts and hidden folders of crashed processes, after a call of `restore_replaced`.

    Args:
        storage: the object through which files are written and removed.
        output_dir: the folder that contains the checkpoints.
    """
    # First: a half-replaced checkpoint is a leftover too, and may be the only good one.
    restore_replaced(storage, output_dir)
    for folder, _ in _leftovers(output_dir):
        with suppress(OSError):
            remove_tree(storage, folder)


def restore_replaced(storage: Storage, output_dir: Path) -> None:
    """Renames checkpoints back to their original names if a crash interrupted their replacement.

    Args:
        storage: the object through which files are written and removed.
        output_dir: the folder that contains the checkpoints.
    """
    for folder, final in interrupted_replacements(output_dir):
        storage.rename(folder, final)
        storage.sync_folder(output_dir)


def interrupted_replacements(output_dir: Path) -> list[tuple[Path, Path]]:
    """Returns (current path, original path) of each checkpoint whose replacement was interrupted by a crash."""
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
    """Returns a string that identifies this process: the process id, the start time and the host name.

    The start time distinguishes this process from a later one with the same process id.
    """
    return f"{os.getpid()}.{_started(os.getpid())}.{_own_host()}"


@functools.cache
def _own_host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname()) or "unnamed"


def is_abandoned(folder: Path, mark: str, *, still_seconds: float = _DAY_SECONDS) -> bool:
    """Returns whether the process that created a draft or hidden folder has ended.

    Args:
        folder: the draft or hidden folder.
        mark: the result of `process_mark` in the process that created the folder.
        still_seconds: the time in seconds after which an unchanged folder of another host counts as abandoned. Whether
            a process on another host is still running cannot be determined.
    """
    # Marks of older versions have no host; they are taken for marks of this host.
    host = mark.split(".", 2)[2] if mark.count(".") > 1 else _own_host()
    if host == _own_host():
        return not is_running(mark)
    try:
        changed = max(file.lstat().st_ctime for file in (folder, *folder.rglob("*")))
    except OSError:  # a file vanished during the walk, so a process is changing the folder
        return False
    return time.time() - changed > still_seconds


def is_running(mark: str) -> bool:
    """Returns whether a mark (see `process_mark`) belongs to another process that is running on this host."""
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
        pass  # the process exists and belongs to another user
    # After a reboot or in a new container the same id soon belongs to another process.
    return not started.isdecimal() or int(started) == _started(process)


def _started(process: int) -> int:
    """Returns the start time of a process in clock ticks since boot; 0 if /proc does not contain the process."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The second field, the command name, may itself contain blanks and parentheses; fields count from the last one.
    return int(facts.rpartition(")")[2].split()[19])
