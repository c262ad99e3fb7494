"""Manifests: the list of a checkpoint's files with sizes and digests, and the verification of files against the list.

A manifest also contains a digest of its own content. A file that the manifest does not list is not part of the
checkpoint.
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
from forgather.ml.checkpoint.files import json_bytes, missing_manifest_error, require_folder

MANIFEST = "manifest.json"
FORMAT = 2
_MAX_BYTES = 1 << 28
_RESUME_AUTO = "--resume auto, or resume_from_checkpoint: auto, does that"


@dataclass(frozen=True, slots=True)
class FileFact:
    """The size and digest of one file of a checkpoint.

    Args:
        size: the size of the file in bytes.
        digest: the 128-bit XXH3 digest of the content, as hexadecimal digits.
    """

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest file.

    Args:
        step: the number of optimizer steps that were done.
        files: the size and digest of each file, by path within the folder.
        facts: the further entries: "run" (see `lineage`), "config", "data", "versions", "layout",
            "initial_weights" (how the weights of step 0 were made, unless one process made or loaded them).
    """

    step: int
    files: Mapping[str, FileFact]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The total size of all listed files in bytes."""
        return sum(fact.size for fact in self.files.values())

    def to_bytes(self) -> bytes:
        """Returns the content of the manifest file."""
        # Sorted: equal checkpoints have equal manifests, whichever rank reported first.
        files = {name: {"bytes": fact.size, "xxh3": fact.digest} for name, fact in sorted(self.files.items())}
        body = {**self.facts, "format": FORMAT, "step": self.step, "files": files}
        return json_bytes({**body, "xxh3": _digest_of(body)})


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint, without checking the files that it lists.

    Raises:
        CheckpointError: FG601 if the folder does not exist; FG602 if it has no manifest; FG603 if the manifest was
            changed; FG670 if the manifest has another format version; FG671 if another program wrote the folder; FG672
            if a listed file is outside of the folder.
    """
    require_folder(folder)
    file = folder / MANIFEST
    if not os.path.isfile(file):
        raise missing_manifest_error(folder, MANIFEST)
    try:
        text = _content(file)
        body = json.loads(text, parse_constant=_refuse_constant)
        digest = body.pop("xxh3")
        # Before the digest: a newer version may compute it differently, and "newer version" is the better message.
        _refuse_other_format(folder, body["format"])
        if _digest_of(body) != digest:
            raise corrupt_file(file, "its own digest does not match")
        manifest = _manifest_of(body, file)
        # JSON has many texts for one value, and the digest covers the value. Only the exact text is accepted: no other
        # whitespace and no duplicate keys.
        if manifest.to_bytes() != text:
            raise corrupt_file(file, "it is not the text that was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt_file(file, f"it cannot be read ({_reason(error)})") from None
    # A renamed or copied folder would be resumed at another step than its name says.
    if folder.name.startswith("checkpoint-") and folder.name != f"checkpoint-{manifest.step}":
        raise corrupt_file(file, f"it belongs to step {manifest.step}, and the folder is named after another step")
    return manifest


def read_small_file(file: Path) -> bytes:
    """Returns the content of a file that is not larger than 256 MiB, a size that no JSON file of a run reaches.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is larger.
    """
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    return file.read_bytes()


def _content(file: Path) -> bytes:
    with file.open("rb") as stream:
        # Bounded, because `stat` says 0 bytes for a pipe or a file of /proc.
        text = stream.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise corrupt_file(file, f"it has more than {_MAX_BYTES} bytes")
    return text


def _refuse_constant(name: str) -> None:
    """Raises an error for NaN and Infinity, which Python's JSON parser accepts and the JSON standard does not.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{name} is not a number")


def _refuse_other_format(folder: Path, found: Any) -> None:
    # Anything else is reported as a corrupt manifest, not as another version.
    if type(found) is not int or found == FORMAT:
        return
    if found > FORMAT:
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} was written by a newer version: it is of format {found}, and this version "
            f"reads format {FORMAT}",
            code="FG670",
            hint="install that version, or resume from another checkpoint",
        )
    raise CheckpointError(
        f"the checkpoint {str(folder)!r} was written by an older version: it is of format {found}, and this version "
        f"reads format {FORMAT}",
        code="FG670",
        hint="continue with the version that wrote it, or start a new run from its weights",
    )


def _manifest_of(body: dict[str, Any], file: Path) -> Manifest:
    if type(body.pop("format")) is not int:
        raise corrupt_file(file, "its format is not a number")
    files = {}
    for name, fact in body.pop("files").items():
        if not _is_inside(name):
            raise CheckpointError(
                f"the manifest {str(file)!r} names {name!r}, which is not a file within its folder",
                code="FG672",
                hint="no run writes such a name: check where the folder comes from, and resume from another one",
            )
        size, digest = fact["bytes"], fact["xxh3"]
        # `type(...) is int`, since JSON's `true` would pass `isinstance`.
        if type(size) is not int or size < 0 or type(digest) is not str:
            raise corrupt_file(file, f"size and digest of {name!r} are malformed")
        files[name] = FileFact(size, digest)
    step = body.pop("step")
    if type(step) is not int or step < 0:
        raise corrupt_file(file, f"its step is {step!r:.40}")
    return Manifest(step, files, body)


def _is_inside(name: str) -> bool:
    """Returns whether a name is a relative path within a checkpoint folder, and not the name of the manifest."""
    return "\0" not in name and name != MANIFEST and not {"", ".", ".."} & set(name.split("/"))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is nested too deeply" if isinstance(error, RecursionError) else type(error).__name__


def check_complete(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint, after a check that all files have the listed sizes; contents are not read.

    Raises:
        CheckpointError: the errors of `read_manifest`; FG603 if a file has another size; FG604 if a file is missing.
    """
    manifest = read_manifest(folder)
    for error in changed_files(folder, manifest, read=False):
        raise error
    return manifest


def verify(folder: Path, *, without: Container[str] = ()) -> Manifest:
    """Returns the manifest of a checkpoint, after comparing the content of every file with the listed digest.

    Args:
        folder: the folder of the checkpoint.
        without: the names of files that may be missing.

    Raises:
        CheckpointError: the errors of `read_manifest`; FG603 if a file was changed; FG604 if a file is missing.
    """
    manifest = read_manifest(folder)
    for error in changed_files(folder, manifest):
        if not (error.code == "FG604" and error.found in without):
            raise error
    return manifest


def first_intact(
    folders: Iterable[Path], *, without: Container[str] = ()
) -> tuple[Path | None, dict[Path, CheckpointError]]:
    """Returns the first intact checkpoint, or None if there is none, and the errors of the checkpoints before it.

    Args:
        folders: the folders of the checkpoints; those after the first intact one are not read.
        without: the names of files that may be missing.
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


def changed_files(folder: Path, manifest: Manifest, *, read: bool = True) -> Iterator[CheckpointError]:
    """Yields an error for each file that is missing or differs from the manifest.

    Args:
        folder: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        read: whether to read the files and compare their digests. If false, only sizes are compared.
    """
    # Resolved once: the folder itself may be reached through a link, only links inside of it are refused.
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
    # A link may point out of the checkpoint, and its target may change after the verification.
    if os.path.realpath(file) != place:
        return corrupt_file(file, "it is a link")
    # Before the content: opening a pipe would block, and a wrong size needs no reading.
    facts = file.stat()
    if not stat.S_ISREG(facts.st_mode):
        return corrupt_file(file, "it is not a regular file")
    if facts.st_size != fact.size:
        return corrupt_file(file, f"it has {facts.st_size} bytes and {fact.size} were written")
    if read and digest_of_file(file) != fact.digest:
        return corrupt_file(file, "its content is not what was written")
    return None


def is_regular(file: Path) -> bool:
    """Returns whether a path is a regular file and not a link. Reading a pipe or a device could block for ever."""
    try:
        return stat.S_ISREG(os.lstat(file).st_mode)
    except (OSError, ValueError):
        return False


def extra_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yields the names of the files in a checkpoint folder that the manifest does not list.

    Args:
        folder: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
    """
    # Links are listed, too: `is_dir` follows them, and a link to a folder could hide files.
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if name not in manifest.files and name != MANIFEST and (file.is_symlink() or not file.is_dir()):
            yield name


def digest_of_file(file: Path) -> str:
    """Returns the XXH3 digest of a file's content, as hexadecimal digits."""
    hasher = xxhash.xxh3_128()
    # Unbuffered: the blocks are larger than a buffer, which would only copy them once more.
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()


def _digest_of(body: Mapping[str, Any]) -> str:
    # Sorted keys: the digest must not depend on the order in which facts were collected.
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()


def corrupt_file(file: Path, what: str) -> CheckpointError:
    """Returns the FG603 error for a file that differs from the file that was written.

    Args:
        file: the path of the file.
        what: a description of the difference.
    """
    return CheckpointError(
        f"the checkpoint file {str(file)!r} is corrupt: {what}",
        code="FG603",
        hint=f"use an earlier one (for a run, {_RESUME_AUTO}); 'fgcli ckpt verify' lists all problems",
    )


def malformed_file(file: Path, what: str) -> CheckpointError:
    """Returns the FG611 error for a file whose content does not have the form in which a run writes it.

    The digest of such a file is correct, so the message does not call the file corrupt.

    Args:
        file: the path of the file.
        what: a description of the unexpected content.
    """
    folder = file.parent
    return CheckpointError(
        f"the checkpoint file {str(file)!r} does not have the form that a run writes: {what}",
        code="FG611",
        hint=f"resume from another checkpoint, and check where this one comes from; see 'fgcli ckpt show {folder}'",
    )


def missing_file(file: Path) -> CheckpointError:
    """Returns the FG604 error for a file that is missing from a checkpoint."""
    return CheckpointError(
        f"the checkpoint file {str(file)!r} is missing",
        code="FG604",
        hint=f"restore the file, or use another checkpoint (for a run, {_RESUME_AUTO})",
    )
