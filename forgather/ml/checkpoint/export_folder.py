"""The folder of an exported model: it is complete under its name, or it does not exist.

All files are written into a hidden folder next to the target and synced. The caller can read them there and compare
them with what they were made from. Then one rename gives the hidden folder the name of the target. `SHA256SUMS` has the
digest of each file, and `export.json` says what the model was made from.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forgather.errors import CheckpointError, ForgatherError
from forgather.ml.checkpoint.checkpoint_dir import Draft, discard_draft, is_abandoned, process_mark
from forgather.ml.checkpoint.files import json_bytes
from forgather.ml.checkpoint.storage import Bytes, LocalStorage, Storage, make_folders, remove_tree

SUMS, FACTS = "SHA256SUMS", "export.json"
"""The file with the digests, and the file that says what was exported."""

_PREFIX = ".exporting-"
_PIECE = 1 << 22


class ExportDraft(Draft):
    """The files of an export that are not visible yet.

    Args:
        storage: the object through which files are written and removed.
        folder: the hidden folder, which exists and is empty.
        into: the folder that the export gets, for messages.
    """

    def __init__(self, storage: Storage, folder: Path, into: Path) -> None:
        super().__init__(storage, folder)
        self.into = into
        self._sums: dict[str, str] = {}

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Writes and syncs a file, and computes its digests while writing.

        Args:
            name: the path of the file within the folder.
            chunks: the content of the file, in order.

        Raises:
            CheckpointError: FG677 if the file cannot be written.
        """
        with _write_errors(self.into):
            super().write(name, self.written_chunks(name, chunks))

    def written_chunks(self, name: str, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        """Yields the chunks of a file unchanged, and stores the digest of the file.

        Args:
            name: the path of the file within the folder.
            chunks: the content of the file, in order.
        """
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
            yield chunk
        self._sums[name] = digest.hexdigest()

    @contextmanager
    def made_file(self, name: str) -> Iterator[Path]:
        """Context manager for a file that another library writes; the file is synced and its digests are computed.

        Args:
            name: the name of the file, whose path is yielded.

        Raises:
            CheckpointError: FG677 if the file cannot be written.
        """
        file = self.folder / f".{name}"
        with _write_errors(self.into):
            yield file
        # Written a second time, so that it takes the way of all other files: digests, sync, the rules of the storage.
        self.write(name, _pieces(file))
        with _write_errors(self.into):
            self.storage.remove_file(file)

    def written(self) -> dict[str, dict[str, Any]]:
        """Returns {"bytes": ..., "sha256": ...} by the name of each file."""
        return {name: {"bytes": self.files[name].size, "sha256": self._sums[name]} for name in sorted(self._sums)}

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Writes the files `export.json` and `SHA256SUMS`.

        Args:
            facts: what was exported, as data for JSON.
        """
        self.write(FACTS, [json_bytes(dict(facts))])
        lines = [f"{digest}  {name}\n" for name, digest in sorted(self._sums.items())]
        with _write_errors(self.into):
            super().write(SUMS, ["".join(lines).encode()])


def _pieces(file: Path) -> Iterator[Bytes]:
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            yield piece


@contextmanager
def export_draft(into: Path, *, storage: Storage | None = None) -> Iterator[ExportDraft]:
    """Context manager for an export: it yields the draft, and gives it the name of the target at the end.

    The target does not change if the context ends with an exception.

    Args:
        into: the new folder, which `refuse_place` has accepted.
        storage: the object through which files are written and removed; the local file system by default.

    Raises:
        CheckpointError: FG677 if the folder cannot be used or written.
    """
    storage, into = storage or LocalStorage(), into.resolve()
    prefix = f"{_PREFIX}{into.name}-"
    with _write_errors(into):
        make_folders(storage, into.parent)
        # A process that was killed could not remove its draft.
        for leftover in sorted(into.parent.glob(f"{prefix}*")):
            if is_abandoned(leftover, leftover.name.removeprefix(prefix)):
                with suppress(OSError):
                    remove_tree(storage, leftover)
        draft = ExportDraft(storage, into.parent / f"{prefix}{process_mark()}", into)
        storage.make_folder(draft.folder)
    try:
        yield draft
        with _write_errors(into):
            for folder, _, _ in os.walk(draft.folder):
                storage.sync_folder(Path(folder))
            storage.rename(draft.folder, into)
            storage.sync_folder(into.parent)
    finally:
        discard_draft(draft)


@contextmanager
def _write_errors(into: Path) -> Iterator[None]:
    try:
        yield
    except ForgatherError:  # some of them are errors of values, too
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        hint = "free space, or name another folder" if is_full else "name a folder that you can write to"
        raise cannot_export(into, f"cannot be written: {reason}", hint) from error


def refuse_place(source: Path, into: Path) -> None:
    """Raises an error if a folder cannot be the target of an export.

    Args:
        source: the folder of the checkpoint.
        into: the target.

    Raises:
        CheckpointError: FG677 if the target is a file or in a file, is not empty, is inside of the checkpoint, or is in
            a folder that cannot be written.
    """
    above = next(folder for folder in into.absolute().parents if folder.exists())
    if not above.is_dir():
        raise cannot_export(into, f"cannot be made: {str(above)!r} is a file", "name another folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise cannot_export(into, f"cannot be made: {str(above)!r} cannot be written", "name another folder")
    if into.resolve().is_relative_to(source.resolve()):
        raise cannot_export(into, "is inside of the checkpoint", "name another folder")
    if into.exists() and not into.is_dir():
        raise cannot_export(into, "is a file", "name a folder")
    if into.is_dir() and any(into.iterdir()):
        raise cannot_export(into, "is not empty", "name a folder that does not exist yet")


def cannot_export(into: Path, why: str, hint: str) -> CheckpointError:
    """Returns the FG677 error for a target that cannot be used."""
    return CheckpointError(f"the model cannot be exported: {str(into)!r} {why}", code="FG677", hint=hint)


def bytes_of(size: str | int) -> int:
    """Returns a file size in bytes.

    Args:
        size: a number of bytes, or a number with KB, MB, GB or TB.

    Raises:
        CheckpointError: FG677 if it is not a file size.

    Example:
        >>> bytes_of("1.5KB")
        1500
    """
    # Powers of 1000, as huggingface_hub reads the same notation.
    found = re.fullmatch(r"([0-9]{1,12}(?:[.][0-9]{1,12})?) *([KMGT])B", str(size).strip().upper())
    number = int(float(found[1]) * 1000 ** (1 + "KMGT".index(found[2]))) if found else size
    if not isinstance(number, int) or number < 1:
        raise CheckpointError(
            f"the model cannot be exported: {size!r:.40} is not a file size",
            code="FG677",
            hint="give a number and KB, MB, GB or TB, as in --max-shard-size 5GB",
        )
    return number
