"""Folders `checkpoint-<step>`: complete or invisible.

Takes an output folder and a storage; gives drafts that processes fill, and the folder of a checkpoint under its final
name. Keeps true: files are written beside and synced, the manifest comes last, and the folder is renamed after all of
that, so a crash or a loss of power at any point leaves either the whole checkpoint or none. A checkpoint that is
replaced by one of the same step stays until the new one has its place; a folder of its name that is none is put aside.
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

# Folders are looked at without torch, which knows the rank: only one process puts one in place.
_log = logging.getLogger(__name__)

_PREFIX = "checkpoint-"
_NAME = re.compile(r"checkpoint-(\d+)\Z")
_TEMPORARY = re.compile(r"\.(saving|replaced|removed)-(checkpoint-\d+)-([\w.-]+)\Z")
_A_DAY, _STILL_SECONDS = 86400.0, 60.0
_PIECE = 8 << 20
_WORTH_A_THREAD = 1 << 20
_BEHIND = 4


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of `step`."""
    return output_dir / f"{_PREFIX}{step}"


def step_of(folder: Path) -> int:
    """Returns the step that the name of a checkpoint folder says; -1 where it says none."""
    match = _NAME.match(folder.name)
    return -1 if match is None else int(match[1])


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of every checkpoint folder, by step."""
    if not output_dir.is_dir():
        return []
    named = ((_NAME.match(folder.name), folder) for folder in output_dir.iterdir() if folder.is_dir())
    return sorted((int(match[1]), folder) for match, folder in named if match)


class Draft:
    """A folder that is being filled; each process writes files of its own.

    Args:
        storage: makes the changes.
        folder: exists.
    """

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage = storage
        self.folder = folder
        self.files: dict[str, FileFact] = {}

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Writes and syncs a file; it is hashed on its way.

        Args:
            name: path within the folder; folders on the way are made.
            chunks: the content, piece by piece.
        """
        file = self.folder / name
        make_folders(self.storage, file.parent)
        hashed = _Hashed(chunks)
        write_file(self.storage, file, hashed)
        self.files[name] = hashed.fact


class _Hashed:
    """The content of a file, in pieces; what they make is known after the last."""

    def __init__(self, chunks: Iterable[Bytes]) -> None:
        self._chunks = chunks
        self._hasher = xxhash.xxh3_128()
        self._size = 0

    def __iter__(self) -> Iterator[Bytes]:
        hashing: deque[Future[None]] = deque()
        with ThreadPoolExecutor(1) as beside:  # it makes its thread when it is first asked
            for piece in self._pieces():
                self._size += len(piece)
                # Neither hashing nor writing holds the interpreter, so one goes on beside the other.
                if hashing or len(piece) >= _WORTH_A_THREAD:
                    hashing.append(beside.submit(self._hasher.update, piece))
                else:
                    self._hasher.update(piece)
                yield piece
                if len(hashing) > _BEHIND:
                    hashing.popleft().result()
            for last in hashing:
                last.result()

    def _pieces(self) -> Iterator[Bytes]:
        for chunk in self._chunks:
            whole = memoryview(chunk).cast("B")
            for start in range(0, len(whole), _PIECE):
                yield whole[start : start + _PIECE]

    @property
    def fact(self) -> FileFact:
        return FileFact(self._size, self._hasher.hexdigest())


def begin_draft(storage: Storage, output_dir: Path, step: int) -> Draft:
    """Returns an empty draft of a checkpoint; leftovers of dead processes are removed first."""
    tidy(storage, output_dir)
    make_folders(storage, output_dir)
    final = checkpoint_folder(output_dir, step)
    if os.path.lexists(final) and not final.is_dir():
        raise FileExistsError(errno.EEXIST, "a file has that name")  # it is none of ours, and stays
    folder = output_dir / f".saving-{_PREFIX}{step}-{own_mark()}"
    storage.make_folder(folder)
    return Draft(storage, folder)


def finish_draft(
    storage: Storage, folder: Path, step: int, files: Mapping[str, FileFact], facts: Mapping[str, Any]
) -> Path:
    """Returns the folder of the checkpoint that a draft becomes.

    Args:
        storage: makes the changes.
        folder: of the draft; every process has written and synced its files.
        step: names the checkpoint; an older one of the same step is replaced.
        files: of all processes.
        facts: what the manifest says beside, see `Manifest`.

    Raises:
        CheckpointError: FG603 or FG604 where a file is not there as it was written; the draft gets no name.
    """
    for inner in sorted({(folder / name).parent for name in files} - {folder}):
        storage.sync_folder(inner)
    write_file(storage, folder / MANIFEST, [Manifest(step, files, facts).to_bytes()])
    storage.sync_folder(folder)
    check_complete(folder)  # a storage may lose what it was given without a word
    final = checkpoint_folder(folder.parent, step)
    _put_in_place(storage, folder, final)
    if not is_regular(final / MANIFEST):
        raise FileNotFoundError(errno.ENOENT, "the storage has not put it in place")
    return final


def _put_in_place(storage: Storage, draft: Path, final: Path) -> None:
    if final.exists() and not os.path.lexists(final / MANIFEST):
        _put_aside(storage, final)
    if not final.exists():
        storage.rename(draft, final)
        storage.sync_folder(final.parent)
        return
    # A folder that is not empty cannot be renamed over. Whatever happens between the two renames, the older
    # checkpoint comes back: here, or by `bring_back` where the process died.
    replaced = final.with_name(f".replaced-{final.name}-{own_mark()}")
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
    """Gives another name to a folder that nobody has written here, and that is in the way of a checkpoint."""
    names = (folder.with_name(f"{folder.name}.aside{number or ''}") for number in itertools.count())
    aside = next(name for name in names if not os.path.lexists(name))
    storage.rename(folder, aside)
    storage.sync_folder(folder.parent)
    _log.warning("%s is no checkpoint of a run of ours, and in the way of one: it is %s now", folder, aside.name)


def drop_draft(draft: Draft) -> None:
    """Removes a draft that becomes no checkpoint."""
    with suppress(OSError):  # the next save removes what is left
        if draft.folder.exists():
            remove_tree(draft.storage, draft.folder)


@contextmanager
def told_by_step(output_dir: Path, step: int) -> Iterator[None]:
    """Turns an error of the storage into the one that names the checkpoint.

    Raises:
        CheckpointError: FG609 where the disk refuses; earlier checkpoints are untouched.
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
    """Returns the folder of a new, complete checkpoint that one process writes.

    Args:
        output_dir: where checkpoints lie.
        step: names the checkpoint; an older one of the same step is replaced.
        fill: writes the files.
        facts: what the manifest says beside, see `Manifest`.
        storage: makes the changes; the file system by default.

    Raises:
        CheckpointError: FG609 where the disk refuses; earlier checkpoints are untouched.
    """
    storage = storage or LocalStorage()
    with told_by_step(output_dir, step):
        draft = begin_draft(storage, output_dir, step)
        try:
            fill(draft)
            return finish_draft(storage, draft.folder, step, draft.files, facts or {})
        finally:
            drop_draft(draft)


def discard_folder(storage: Storage, folder: Path) -> None:
    """Removes a checkpoint; it is out of sight, for good, before the first of its files is gone."""
    hidden = folder.with_name(f".removed-{folder.name}-{own_mark()}")
    storage.rename(folder, hidden)
    storage.sync_folder(folder.parent)
    with suppress(OSError):  # the next save removes what is left
        remove_tree(storage, hidden)


def tidy(storage: Storage, output_dir: Path) -> None:
    """Brings back what a dead process was about to replace, and removes what else it left."""
    bring_back(storage, output_dir)
    for folder, _ in _leftovers(output_dir):
        with suppress(OSError):
            remove_tree(storage, folder)


def bring_back(storage: Storage, output_dir: Path) -> None:
    """Gives back its name to a checkpoint that a dead process was about to replace."""
    for folder, final in half_replaced(output_dir):
        storage.rename(folder, final)
        storage.sync_folder(output_dir)


def half_replaced(output_dir: Path) -> list[tuple[Path, Path]]:
    """Returns the checkpoints that a dead process was about to replace: where each lies, and the name that it had."""
    found = _leftovers(output_dir, still_seconds=_STILL_SECONDS)
    replaced = [(folder, output_dir / match[2]) for folder, match in found if match[1] == "replaced"]
    return [(folder, final) for folder, final in replaced if not final.exists()]


def _leftovers(output_dir: Path, *, still_seconds: float = _A_DAY) -> list[tuple[Path, re.Match[str]]]:
    folders = sorted(output_dir.iterdir()) if output_dir.is_dir() else []
    named = [(folder, _TEMPORARY.match(folder.name)) for folder in folders]
    left = [(folder, match) for folder, match in named if match is not None]
    return [(folder, match) for folder, match in left if is_left(folder, match[3], still_seconds=still_seconds)]


def own_mark() -> str:
    """Returns what tells this process from every other one, also from a later one that has its number."""
    return f"{os.getpid()}.{_started(os.getpid())}.{_own_host()}"


@functools.cache
def _own_host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname()) or "unnamed"


def is_left(folder: Path, mark: str, *, still_seconds: float = _A_DAY) -> bool:
    """Tells whether nobody writes into a folder any more.

    Args:
        folder: that a process works with.
        mark: of the process.
        still_seconds: so long nothing in the folder must have changed, where the process is one of another machine that
            shares the folder: whether it runs cannot be asked there.
    """
    host = mark.split(".", 2)[2] if mark.count(".") > 1 else _own_host()
    if host == _own_host():
        return not is_running(mark)
    try:
        changed = max(file.lstat().st_ctime for file in (folder, *folder.rglob("*")))
    except OSError:  # somebody changes it now
        return False
    return time.time() - changed > still_seconds


def is_running(mark: str) -> bool:
    """Tells whether the process of this machine that made a mark still runs, and is not this one."""
    number, _, rest = mark.partition(".")
    started = rest.partition(".")[0]
    if not number.isdecimal() or int(number) == os.getpid():
        return False
    process = int(number)
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    # After a restart of the machine or the container, the number is soon that of another process.
    return not started.isdecimal() or int(started) == _started(process)


def _started(process: int) -> int:
    """Returns when a process began, in the system's own count; 0 where the system does not say."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(facts.rpartition(")")[2].split()[19])
