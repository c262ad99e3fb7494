"""Files that a user's `save_function` adds to checkpoints, and the check of a user's storage.

The function is called at a step boundary on every process, each time with a different temporary path. The files that it
creates at this path are copied into the checkpoint, and are hashed and synced like all other files. If the function
fails on one process, the save fails on all processes.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from forgather.errors import CheckpointError, TrainingError
from forgather.ml.checkpoint.files import CUSTOM
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed import collectives

# Read from the protocol, so that a method that is added there is required of users' storages, too.
_ACTS = [name for name in vars(Storage) if not name.startswith("_")]

SaveFunction = Callable[[nn.Module, int, Path], Any]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Temporary files that will be copied into a checkpoint.

    Args:
        files: the path of each temporary file, by the file's name in the checkpoint.
        folder: the temporary folder that contains all these files.
    """

    files: dict[str, Path]
    folder: Path

    def remove(self) -> None:
        """Removes the temporary folder and all files in it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def run_save_function(function: SaveFunction, model: nn.Module, step: int) -> Scratch:
    """Calls a user's save function and returns the files that it created. Collective: every process must call it.

    Args:
        function: the user's function. It is called with the model, the step, and a path at which it may create a file
            or a folder.
        model: the model as this process trains it, which may be sharded.
        step: the number of optimizer steps that were done.

    Raises:
        CheckpointError: FG631, on every process, if the function fails on one process.
    """
    # A local folder: the function may write by any means, which a storage need not support.
    scratch = Path(tempfile.mkdtemp(prefix="forgather-save-function-"))
    path = scratch / CUSTOM
    try:
        # Collective: a function that fails on one rank must not leave the others waiting in the save.
        collectives.run_collectively(functools.partial(_call, function, model, step, path))
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    # A folder per rank: the ranks write into one checkpoint, and may choose the same names.
    own = f"{CUSTOM}/rank-{collectives.rank()}" if collectives.is_multi_process() else CUSTOM
    left = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    names = [own if file == path else f"{own}/{file.relative_to(path).as_posix()}" for file in left]
    return Scratch(dict(zip(names, left, strict=True)), scratch)


def _call(function: SaveFunction, model: nn.Module, step: int, path: Path) -> None:
    try:
        function(model, step, path)
    except Exception as error:  # noqa: BLE001 - code of the user: reported as one error, with its cause
        raise CheckpointError(
            f"save_function failed at step {step}: {type(error).__name__}: {error}",
            code="FG631",
            hint="it is called with (model, step, path), and may make a file or a folder at the path; earlier "
            "checkpoints are untouched",
        ).about("save_function") from error


def check_storage(storage: Any) -> None:
    """Raises an error if an object lacks a method of `Storage`.

    Raises:
        TrainingError: FG632 if a method is missing.
    """
    # By methods, not by class: a user's storage need not derive from ours.
    missing = [name for name in _ACTS if not callable(getattr(storage, name, None))]
    if missing:
        raise TrainingError(
            f"storage is a {type(storage).__name__}, which has no {missing[0]}()",
            code="FG632",
            hint="a storage has " + ", ".join(f"{name}()" for name in _ACTS) + "; see forgather.ml.checkpoint:Storage",
        ).about("storage")
