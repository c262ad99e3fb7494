"""Content-addressed cache of prepared data: folders that are built once and looked up by a key.

The inputs are a key that covers everything on which the content depends, and a function that fills an empty folder. The
output is a complete folder. A folder is built under a temporary name; a manifest records the sizes and digests of the
files; then the folder is renamed. A damaged folder is built again. A file lock ensures that several processes which
need the same folder build it only once. Building a folder does not change the random states of the caller.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs
import xxhash
from filelock import FileLock, Timeout

from forgather.ml.random_state import forked_random

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_LATELY_SECONDS = 3600  # longer than a run takes from finding a folder to having its files open
_CHUNK_BYTES = 1 << 22
_DIGEST_LIMIT_BYTES = 4 << 30  # reading more than this at every start costs more than it protects


def content_key(**parts: Any) -> str:
    """Returns a digest of JSON-compatible data, which serves as the key of a cached folder.

    Equal data give equal keys.
    """
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode())


def files_digest(files: Sequence[str]) -> str:
    """Returns a digest of the contents of files in their order; their folders and times of change do not count.

    Args:
        files: the paths of the files.
    """
    digest = xxhash.xxh3_128()
    for file in files:
        # The suffix says how a file is compressed.
        digest.update(f"{''.join(Path(file).suffixes)} {os.path.getsize(file)} ".encode())
        with open(file, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def default_cache_dir() -> Path:
    """Returns the current user's cache folder for prepared data."""
    return Path(platformdirs.user_cache_dir("forgather", appauthor=False)) / "data"


def cached_folder(
    kind: str, key: str, build: Callable[[Path], None], cache_dir: str | os.PathLike[str] | None = None
) -> Path:
    """Returns the complete folder `<cache_dir>/<kind>/<key>`; calls `build` if the folder is missing or damaged.

    Args:
        kind: the kind of content, for example "tokenizer", which is the name of the parent folder.
        key: the digest of everything on which the content depends, from `content_key`.
        build: a function that fills the empty folder that is its argument.
        cache_dir: the root of the cache, or None for the user's cache folder. If the user's cache folder is not
            writable, a temporary folder is used and a warning is logged.

    Raises:
        OSError: if `cache_dir` is given and is not writable.
    """
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    try:
        (root / kind).mkdir(parents=True, exist_ok=True)
        # The lock file is next to the folder and not in it, since the folder is replaced as a whole.
        lock = FileLock(root / kind / f"{key}.lock")
        lock.acquire()
    except OSError as error:
        # A folder that the user has named must not be replaced silently by another one.
        if cache_dir is not None:
            raise
        logger.warning("cache folder %s cannot be used (%s); prepared data is not kept", root, error)
        folder = Path(tempfile.mkdtemp(prefix="forgather-"))
        _build(folder, build)
        return folder
    try:
        folder = root / kind / key
        # Under the lock: another process may have built the folder while this one was waiting.
        if _is_whole(folder):
            with suppress(OSError):
                # `prune` removes the folders with the oldest manifest, so a use is recorded as its modification time.
                os.utime(folder / _MANIFEST)
            logger.info("%s found in the cache: %s", kind, folder)
        else:
            _build_aside(folder, build)
        return folder
    finally:
        lock.release()


def find_folder(kind: str, key: str, cache_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Returns the complete folder `<cache_dir>/<kind>/<key>`, or None if it is missing or damaged.

    Args:
        kind: the kind of content, as in `cached_folder`.
        key: the digest of everything on which the content depends, from `content_key`.
        cache_dir: the root of the cache, or None for the user's cache folder.
    """
    folder = (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / kind / key
    if not _is_whole(folder):
        return None
    with suppress(OSError):
        os.utime(folder / _MANIFEST)
    return folder


def prune(kind: str, *, max_bytes: int, max_folders: int, cache_dir: str | os.PathLike[str] | None = None) -> None:
    """Removes the least recently used folders of a kind until the remaining folders are within the limits.

    A folder that was used within the last hour, or that another process has locked, is never removed.

    Args:
        kind: the kind of content, as in `cached_folder`.
        max_bytes: the maximum total size of the folders, in bytes.
        max_folders: the maximum number of folders.
        cache_dir: the root of the cache, or None for the user's cache folder.
    """
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    found: list[tuple[float, int, Path]] = []
    for manifest in (root / kind).glob(f"*/{_MANIFEST}"):
        with suppress(OSError):
            size = sum(file.stat().st_size for file in manifest.parent.iterdir())
            found.append((manifest.stat().st_mtime, size, manifest.parent))
    # The most recently used come first and are kept while they fit.
    found.sort(reverse=True)
    total = 0
    for position, (used, size, folder) in enumerate(found):
        total += size
        if (total > max_bytes or position >= max_folders) and time.time() - used > _LATELY_SECONDS:
            # No waiting: a folder that is locked is in use.
            with suppress(Timeout, OSError), FileLock(folder.parent / f"{folder.name}.lock", timeout=0):
                shutil.rmtree(folder)


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    # A build must not depend on earlier draws, and must not change later ones: a run that finds the folder does not
    # build.
    with forked_random(0):
        build(folder)


def _build_aside(folder: Path, build: Callable[[Path], None]) -> None:
    if folder.exists():
        logger.warning("cache entry %s is damaged and is built again", folder)
        shutil.rmtree(folder)
    for abandoned in folder.parent.glob(f".{folder.name}-*"):  # of a killed process, since this one holds the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _build(aside, build)
        # The manifest is written last, so that a folder without one is never complete.
        files = {file.name: _facts(file) for file in sorted(aside.iterdir())}
        (aside / _MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
        os.replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _is_whole(folder: Path) -> bool:
    try:
        expected = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        # An empty manifest would make an empty folder complete.
        return bool(expected) and all(_facts(folder / name) == facts for name, facts in expected.items())
    except (OSError, ValueError, AttributeError):
        return False


def _facts(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    if size > _DIGEST_LIMIT_BYTES:
        return {"bytes": size}
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return {"bytes": size, "xxh3": digest.hexdigest()}
