"""What a checkpoint says of itself: its step, where it comes from, and each of its files with size and digest.

Takes a folder; gives its `Manifest`, or one error that names what is wrong. Keeps true: the manifest is covered by a
digest of its own; a file that it does not list is not part of the checkpoint.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.files import as_json
from forgather.ml.checkpoint.folder_checks import not_ours, refuse_no_folder

MANIFEST = "manifest.json"
FORMAT = 2
_MOST_BYTES = 1 << 28
_AUTO = "--resume auto, or resume_from_checkpoint: auto, does that"


@dataclass(frozen=True, slots=True)
class FileFact:
    """What is known of a file of a checkpoint.

    Args:
        size: in bytes.
        digest: xxh3 of 128 bits, in hexadecimal digits.
    """

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself.

    Args:
        step: updates that were done.
        files: what it is made of, by path within the folder.
        facts: where it comes from: "run" (see `lineage`), "config", "data", "versions", "layout".
    """

    step: int
    files: Mapping[str, FileFact]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(fact.size for fact in self.files.values())

    def to_bytes(self) -> bytes:
        """Returns the text of the manifest's file."""
        files = {name: {"bytes": fact.size, "xxh3": fact.digest} for name, fact in sorted(self.files.items())}
        body = {**self.facts, "format": FORMAT, "step": self.step, "files": files}
        return as_json({**body, "xxh3": _digest_of(body)})


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: FG601 for no folder, FG602 for no manifest, FG603 for one that is not as it was written, FG670
            for one of another format, FG671 for a folder that another program wrote, FG672 for one that names files
            outside of its folder.
    """
    refuse_no_folder(folder)
    file = folder / MANIFEST
    if not os.path.isfile(file):
        raise not_ours(folder, MANIFEST)
    try:
        text = _content(file)
        body = json.loads(text, parse_constant=_refuse_constant)
        digest = body.pop("xxh3")
        _refuse_other_format(folder, body["format"])
        if _digest_of(body) != digest:
            raise corrupt_file(file, "its own digest does not match")
        manifest = _manifest_of(body, file)
        # What is written is one text alone: not even a blank may be another, nor may a key stand there twice.
        if manifest.to_bytes() != text:
            raise corrupt_file(file, "it is not the text that was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt_file(file, f"it cannot be read ({_why(error)})") from None
    if folder.name.startswith("checkpoint-") and folder.name != f"checkpoint-{manifest.step}":
        raise corrupt_file(file, f"it is that of step {manifest.step}, and the folder has the name of another")
    return manifest


def small_file(file: Path) -> bytes:
    """Returns what a file of JSON holds.

    Raises:
        OSError, ValueError: it cannot be read, or has more bytes than any run writes.
    """
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return file.read_bytes()


def _content(file: Path) -> bytes:
    with file.open("rb") as stream:
        text = stream.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise corrupt_file(file, f"it has more than {_MOST_BYTES} bytes")
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _refuse_other_format(folder: Path, found: Any) -> None:
    if type(found) is not int or found == FORMAT:
        return
    if found > FORMAT:
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} was written by a newer version: it is of format {found}, and this version "
            f"reads format {FORMAT}",
            code="FG670",
            hint="install that version, or go on from another checkpoint",
        )
    raise CheckpointError(
        f"the checkpoint {str(folder)!r} was written by an older version: it is of format {found}, and this version "
        f"reads format {FORMAT}",
        code="FG670",
        hint="go on with the version that wrote it, or begin anew from its weights",
    )


def _manifest_of(body: dict[str, Any], file: Path) -> Manifest:
    if type(body.pop("format")) is not int:
        raise corrupt_file(file, "its format is no number")
    files = {}
    for name, fact in body.pop("files").items():
        if not _lies_within(name):
            raise CheckpointError(
                f"the manifest {str(file)!r} names {name!r}, which is no file within its folder",
                code="FG672",
                hint="no checkpoint of ours names such a file: ask where the folder comes from, and go on from another",
            )
        size, digest = fact["bytes"], fact["xxh3"]
        if type(size) is not int or size < 0 or type(digest) is not str:
            raise corrupt_file(file, f"size and digest of {name!r} are none")
        files[name] = FileFact(size, digest)
    step = body.pop("step")
    if type(step) is not int or step < 0:
        raise corrupt_file(file, f"its step is {step!r:.40}")
    return Manifest(step, files, body)


def _lies_within(name: str) -> bool:
    return "\0" not in name and name != MANIFEST and not {"", ".", ".."} & set(name.split("/"))


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is nested too deeply" if isinstance(error, RecursionError) else type(error).__name__


def check_complete(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint that has each file in its size; what they hold is not read.

    Raises:
        CheckpointError: as `read_manifest`; FG603 for a file of another size, FG604 for a missing one.
    """
    manifest = read_manifest(folder)
    for error in changes(folder, manifest, read=False):
        raise error
    return manifest


def verify(folder: Path, *, without: Container[str] = ()) -> Manifest:
    """Returns the manifest of a checkpoint whose every file is as it was written.

    Args:
        folder: of the checkpoint.
        without: names of files that may be missing.

    Raises:
        CheckpointError: as `read_manifest`; FG603 for a changed file, FG604 for a missing one.
    """
    manifest = read_manifest(folder)
    for error in changes(folder, manifest):
        if not (error.code == "FG604" and error.found in without):
            raise error
    return manifest


def first_intact(
    folders: Iterable[Path], *, without: Container[str] = ()
) -> tuple[Path | None, dict[Path, CheckpointError]]:
    """Returns the first of some checkpoints that is as it was written (None for none), and what is wrong with others.

    Args:
        folders: of checkpoints; those after the first intact one are not read.
        without: names of files that may be missing.
    """
    wrong: dict[Path, CheckpointError] = {}
    for folder in folders:
        try:
            verify(folder, without=without)
        except CheckpointError as error:
            wrong[folder] = error
        else:
            return folder, wrong
    return None, wrong


def changes(folder: Path, manifest: Manifest, *, read: bool = True) -> Iterator[CheckpointError]:
    """Yields an error for each file that is not as it was written.

    Args:
        folder: of the checkpoint.
        manifest: of the same.
        read: False looks at sizes alone.
    """
    place = os.path.realpath(folder)
    for name, fact in manifest.files.items():
        try:
            error = _change(folder / name, os.path.join(place, name), fact, read=read)
        except OSError as failure:
            error = corrupt_file(folder / name, f"it cannot be read ({failure.strerror})")
        if error is not None:
            error.found = name
            yield error


def _change(file: Path, place: str, fact: FileFact, *, read: bool) -> CheckpointError | None:
    if not os.path.lexists(file):
        return missing_file(file)
    # A link may point at another thing tomorrow, and out of the checkpoint today.
    if os.path.realpath(file) != place:
        return corrupt_file(file, "it is a link")
    facts = file.stat()
    if not stat.S_ISREG(facts.st_mode):
        return corrupt_file(file, "it is no regular file")
    if facts.st_size != fact.size:
        return corrupt_file(file, f"it has {facts.st_size} bytes and {fact.size} were written")
    if read and digest_of_file(file) != fact.digest:
        return corrupt_file(file, "its content is not what was written")
    return None


def is_regular(file: Path) -> bool:
    """Tells whether a file is one itself: no link, and no pipe or device whose reading may never end."""
    try:
        return stat.S_ISREG(os.lstat(file).st_mode)
    except (OSError, ValueError):
        return False


def extra_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yields files that lie in the folder of a checkpoint and are no part of it."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if name not in manifest.files and name != MANIFEST and (file.is_symlink() or not file.is_dir()):
            yield name


def digest_of_file(file: Path) -> str:
    """Returns the digest of what a file holds."""
    hasher = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()


def _digest_of(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()


def corrupt_file(file: Path, what: str) -> CheckpointError:
    """Returns the error for a file of a checkpoint that is not what was written."""
    return CheckpointError(
        f"the checkpoint file {str(file)!r} is corrupt: {what}",
        code="FG603",
        hint=f"resume from an earlier one ({_AUTO}); 'fgcli ckpt verify' tells all that is wrong",
    )


def unlike_a_run(file: Path, what: str) -> CheckpointError:
    """Returns the error for a file whose digest fits, and that holds what no run writes.

    Nobody is told that such a checkpoint is corrupt: what was written is still there.
    """
    folder = file.parent
    return CheckpointError(
        f"the checkpoint file {str(file)!r} is not as a run writes it: {what}",
        code="FG611",
        hint=f"go on from another checkpoint, and ask where this one comes from; 'fgcli ckpt show {folder}' tells more",
    )


def missing_file(file: Path) -> CheckpointError:
    """Returns the error for a file that a checkpoint should have."""
    return CheckpointError(
        f"the checkpoint file {str(file)!r} is missing",
        code="FG604",
        hint=f"restore the file, or resume from another checkpoint ({_AUTO})",
    )
