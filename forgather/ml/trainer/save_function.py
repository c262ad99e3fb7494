"""What a user's own function, and a user's own storage, add to checkpoints.

Takes a function that is called with the model, the step and a path; gives the files that it left there. Keeps true: it
is called at the step boundary, on every process, with a path that nobody else uses; what it leaves is copied into the
checkpoint through the storage, hashed and synced like every other file; where it fails on one process it has failed on
all.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from forgather.errors import CheckpointError, TrainingError
from forgather.ml.checkpoint.files import CUSTOM
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed import collectives

_ACTS = [name for name in vars(Storage) if not name.startswith("_")]

SaveFunction = Callable[[nn.Module, int, Path], Any]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Files that wait to be copied into a checkpoint.

    Args:
        files: where each lies, by its name in the checkpoint.
        folder: holds them all; None where there are none.
    """

    files: dict[str, Path] = field(default_factory=dict)
    folder: Path | None = None

    def remove(self) -> None:
        """Removes the files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def written_by(function: SaveFunction, model: nn.Module, step: int) -> Scratch:
    """Returns what a function writes of a step; every process calls it.

    Args:
        function: called with the model as it is trained, the step, and a path; there it may make a file or a folder.
        model: as it lies in this process.
        step: updates that were done.

    Raises:
        CheckpointError: FG631, on every process, where the function fails on one.
    """
    scratch = Path(tempfile.mkdtemp(prefix="forgather-save-function-"))
    path = scratch / CUSTOM
    try:
        collectives.run_collectively(functools.partial(_call, function, model, step, path))
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    own = f"{CUSTOM}/rank-{collectives.rank()}" if collectives.several() else CUSTOM
    left = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    names = [own if file == path else f"{own}/{file.relative_to(path).as_posix()}" for file in left]
    return Scratch(dict(zip(names, left, strict=True)), scratch)


def _call(function: SaveFunction, model: nn.Module, step: int, path: Path) -> None:
    try:
        function(model, step, path)
    except Exception as error:  # noqa: BLE001 - the border to the user's code: told as one error, with its cause
        raise CheckpointError(
            f"save_function failed at step {step}: {type(error).__name__}: {error}",
            code="FG631",
            hint="it is called with (model, step, path), and may make a file or a folder at the path; earlier "
            "checkpoints are untouched",
        ).about("save_function") from error


def refuse_no_storage(storage: Any) -> None:
    """Raises where an object cannot be used as a storage.

    Raises:
        TrainingError: FG632, about the argument.
    """
    missing = [name for name in _ACTS if not callable(getattr(storage, name, None))]
    if missing:
        raise TrainingError(
            f"storage is a {type(storage).__name__}, which has no {missing[0]}()",
            code="FG632",
            hint="a storage has " + ", ".join(f"{name}()" for name in _ACTS) + "; see forgather.ml.checkpoint:Storage",
        ).about("storage")
