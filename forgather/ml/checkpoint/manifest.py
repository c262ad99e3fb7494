"""What a checkpoint says of itself: its step, where it comes from, and each of its files with size and digest.

Takes a folder; gives its `Manifest`, or one error that names what is wrong. Keeps true: the manifest is covered by a
digest of its own; a file that it does not list is not part of the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from forgather.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2


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
        facts: where it comes from: "run" (see `lineage`), "config", "versions", "layout".
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
        return (json.dumps({**body, "xxh3": _digest_of(body)}, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: FG601 for no folder, FG602 for no manifest, FG603 for one that is not as it was written.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no checkpoint folder {str(folder)!r}",
            code="FG601",
            hint="give a folder named checkpoint-<step>, or resume_from_checkpoint: auto",
        )
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} has no {MANIFEST}, so it is incomplete or was not written here",
            code="FG602",
            hint="resume from another checkpoint, or remove the folder",
        )
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        digest = body.pop("xxh3")
        if _digest_of(body) != digest:
            raise corrupt_file(file, "its own digest does not match")
        if body.pop("format") != FORMAT:
            raise corrupt_file(file, f"it is of another format than {FORMAT}")
        files = {name: FileFact(fact["bytes"], fact["xxh3"]) for name, fact in body.pop("files").items()}
        return Manifest(body.pop("step"), files, body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise corrupt_file(file, f"it cannot be read ({type(error).__name__})") from None


def verify(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint whose every file is as it was written.

    Raises:
        CheckpointError: FG601 to FG603 as `read_manifest`, FG603 for a changed file, FG604 for a missing one.
    """
    manifest = read_manifest(folder)
    for name, fact in manifest.files.items():
        _verify_file(folder / name, fact)
    return manifest


def extra_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yields files that lie in the folder of a checkpoint and are no part of it."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if name not in manifest.files and name != MANIFEST and not file.is_dir():
            yield name


def _verify_file(file: Path, fact: FileFact) -> None:
    try:
        if not file.is_file():
            raise missing_file(file)
        size = file.stat().st_size
        if size != fact.size:
            raise corrupt_file(file, f"it has {size} bytes and {fact.size} were written")
        if digest_of_file(file) != fact.digest:
            raise corrupt_file(file, "its content is not what was written")
    except OSError as error:
        raise corrupt_file(file, f"it cannot be read ({error.strerror})") from None


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
        hint="remove this checkpoint folder and resume from an earlier one (resume_from_checkpoint: auto does that)",
    )


def missing_file(file: Path) -> CheckpointError:
    """Returns the error for a file that a checkpoint should have."""
    return CheckpointError(
        f"the checkpoint file {str(file)!r} is missing",
        code="FG604",
        hint="restore the file, or resume from another checkpoint (resume_from_checkpoint: auto does that)",
    )
