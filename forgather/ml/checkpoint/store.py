"""Folders `checkpoint-<step>`: complete or invisible.

Takes a function that fills a folder; gives the folder under its final name. Keeps true: files are
written beside, synced, listed in a manifest with size and digest, and the folder is renamed last, so a
crash at any point leaves either the whole checkpoint or none. A checkpoint that is replaced by one of the same
step stays until the new one has its place. A checkpoint is verified before it is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.state import corrupt_file, missing_file

MANIFEST = "manifest.json"
_PREFIX = "checkpoint-"
_NAME = re.compile(r"checkpoint-(\d+)\Z")
_TEMPORARY = re.compile(r"\.(saving|replaced|removed)-(checkpoint-\d+)-(\d+)\Z")
_FORMAT = 1


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


def write_checkpoint(
    output_dir: Path, step: int, fill: Callable[[Path], None], *, run: Mapping[str, Any] | None = None
) -> Path:
    """Returns the folder of a new, complete checkpoint.

    Args:
        output_dir: where checkpoints lie.
        step: names the checkpoint; an older one of the same step is replaced.
        fill: writes the files into the folder it is given.
        run: what the manifest says of the run, see `lineage.next_origin`.

    Raises:
        CheckpointError: FG609 where the disk refuses; earlier checkpoints are untouched.
    """
    final = checkpoint_folder(output_dir, step)
    draft = output_dir / f".saving-{final.name}-{os.getpid()}"
    try:
        _tidy(output_dir)
        draft.mkdir(parents=True)
        fill(draft)
        _seal(draft, step, run)
        _put_in_place(draft, final)
        _sync_folder(output_dir)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {str(final)!r}: "
            f"{getattr(error, 'strerror', None) or error}",
            code="FG609",
            hint="free space or change output_dir; earlier checkpoints are untouched",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _put_in_place(draft: Path, final: Path) -> None:
    if not final.exists():
        os.replace(draft, final)
        return
    # A folder that is not empty cannot be renamed over. Whatever happens between the two renames, the older
    # checkpoint comes back: here, or by `_tidy` where the process died.
    replaced = final.with_name(f".replaced-{final.name}-{os.getpid()}")
    os.replace(final, replaced)
    try:
        os.replace(draft, final)
    except BaseException:
        os.replace(replaced, final)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def discard_folder(folder: Path) -> None:
    """Removes a checkpoint; it is out of sight before the first of its files is gone."""
    hidden = folder.with_name(f".removed-{folder.name}-{os.getpid()}")
    os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _tidy(output_dir: Path) -> None:
    """Brings back what a dead process was about to replace, and removes what else it left."""
    bring_back(output_dir)
    for folder, _ in _leftovers(output_dir):
        shutil.rmtree(folder, ignore_errors=True)


def bring_back(output_dir: Path) -> None:
    """Gives back its name to a checkpoint that a dead process was about to replace."""
    for folder, match in _leftovers(output_dir):
        final = output_dir / match[2]
        if match[1] == "replaced" and not final.exists():
            os.replace(folder, final)


def _leftovers(output_dir: Path) -> list[tuple[Path, re.Match[str]]]:
    folders = sorted(output_dir.iterdir()) if output_dir.is_dir() else []
    named = [(folder, _TEMPORARY.match(folder.name)) for folder in folders]
    return [(folder, match) for folder, match in named if match is not None and not _is_running(int(match[3]))]


def _is_running(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _seal(draft: Path, step: int, run: Mapping[str, Any] | None) -> None:
    files = {}
    for file in _files_of(draft):
        _sync_file(file)
        files[file.relative_to(draft).as_posix()] = {"bytes": file.stat().st_size, "xxh3": _digest(file)}
    body: dict[str, Any] = {"format": _FORMAT, "step": step, "files": files}
    if run is not None:
        body["run"] = dict(run)
    manifest = draft / MANIFEST
    manifest.write_text(json.dumps({**body, "xxh3": _digest_of(body)}, indent=1) + "\n", encoding="utf-8")
    _sync_file(manifest)
    for folder in {file.parent for file in _files_of(draft)} | {draft}:
        _sync_folder(folder)


def _files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _digest(file: Path) -> str:
    hasher = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()


def _digest_of(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sync_file(file: Path) -> None:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify(folder: Path) -> int:
    """Returns the step of a checkpoint whose every file is as it was written.

    Raises:
        CheckpointError: FG601 for no folder, FG602 for no manifest, FG603 for a changed file, FG604 for
            a missing one.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no checkpoint folder {str(folder)!r}",
            code="FG601",
            hint="give a folder named checkpoint-<step>, or resume_from_checkpoint: auto",
        )
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} has no {MANIFEST}, so it is incomplete or was not written here",
            code="FG602",
            hint="resume from another checkpoint, or remove the folder",
        )
    body = _read_manifest(manifest)
    for name, fact in body["files"].items():
        _verify_file(folder / name, fact)
    return int(body["step"])


def _read_manifest(manifest: Path) -> dict[str, Any]:
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        digest = content.pop("xxh3")
        if _digest_of(content) != digest:
            raise corrupt_file(manifest, "its own digest does not match")
        if content["format"] != _FORMAT:
            raise corrupt_file(manifest, f"it has format {content['format']!r}, and {_FORMAT} is known")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise corrupt_file(manifest, f"it cannot be read ({type(error).__name__})") from None
    return dict(content)


def _verify_file(file: Path, fact: dict[str, Any]) -> None:
    if not file.is_file():
        raise missing_file(file)
    size = file.stat().st_size
    if size != fact["bytes"]:
        raise corrupt_file(file, f"it has {size} bytes and {fact['bytes']} were written")
    if _digest(file) != fact["xxh3"]:
        raise corrupt_file(file, "its content is not what was written")
