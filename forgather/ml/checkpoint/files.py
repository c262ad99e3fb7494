"""File names in checkpoints and model folders, and errors for folders that are not checkpoints.

The file names are defined in this module only. It does not import torch, so that commands that only list folders can
use it. `require_folder` and `missing_manifest_error` report folders that are not checkpoints of this library, and guess
which program wrote them. They read only file names and open no file: another program's checkpoint may be a pickle, and
unpickling runs code.
"""

from __future__ import annotations

import json
import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from forgather.errors import CheckpointError

MODEL, SLICES, EXTRA_STATE = "model", "weights", "model_extra_state"
"""The file name stems of whole weights (the one of `from_pretrained`), sharded weights and other model state."""

WEIGHTS, WEIGHTS_INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
"""The files that `from_pretrained` looks for in a folder."""

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files that peft looks for in a folder."""

BASE_MODEL = "base_model.json"
"""The file that names the base model of an adapter, with the digest of its weights."""

REFERENCE_MODEL = "reference.json"
"""The file in the folder of a saved model with the digest of the reference that its loss compared it with."""

INDEX = "index.json"
"""The file that lists the chunks of each tensor of a checkpoint, with the file and the key of each chunk."""

TRAINER_STATE, TRAINING_ARGS = "trainer_state.json", "training_args.json"
"""The files for the trainer state and the training arguments, in the layout that tools of transformers read."""

TRAINING_STATE = "training_state"
"""The stem of the files that store the learning rate schedule, the data position, random states and the loss meter."""

OPTIMIZER, SCHEDULE, DATA, RNG, METER, PROGRESS = "optimizer", "schedule", "data", "rng", "meter", "progress"
"""The names of the parts of a checkpoint without the weights, as `--allow-missing` accepts them."""

IN_TRAINING_STATE = (SCHEDULE, DATA, RNG, METER)
RESUME_PARTS = (OPTIMIZER, *IN_TRAINING_STATE)
"""The names of the parts that a checkpoint saved with `save_only_model` does not contain."""

CUSTOM = "custom"
"""The folder, within a checkpoint, for the files of a user's `save_function`."""


def parts_in(name: str) -> tuple[str, ...]:
    """Returns the names of the parts that a checkpoint file stores, or () for a file that every resume needs."""
    if name == TRAINER_STATE:
        return (PROGRESS,)
    # With the dot, so that `training_state.json` and `training_state.safetensors` match and nothing else.
    if name.startswith(f"{TRAINING_STATE}."):
        return IN_TRAINING_STATE
    return (OPTIMIZER,) if name.startswith(OPTIMIZER) else ()


def json_bytes(value: Any) -> bytes:
    """Returns a value as the content of an indented JSON file."""
    return (json.dumps(value, indent=1) + "\n").encode()


TRANSFORMERS = "the Trainer of transformers"
"""The name of the program that wrote a checkpoint which a run of this library continues."""

# The program that wrote a folder, by file name patterns that must all match; the first matching row decides.
_FOREIGN_FILES = (
    ("torch.distributed.checkpoint", (".metadata", "*.distcp")),
    ("DeepSpeed", ("latest", "global_step*")),
    ("DeepSpeed", ("*mp_rank_*_model_states.pt",)),
    (TRANSFORMERS, ("trainer_state.json", "*.pt")),
    (TRANSFORMERS, ("trainer_state.json", "training_args.bin")),
    ("accelerator.save_state()", ("random_states_*.pkl",)),
)
_MODEL_FILES = ("config.json", "*model*.safetensors")
_OUR_FILES = ("training_state.json", "optimizer.json", "optimizer.safetensors")
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def require_folder(folder: Path) -> None:
    """Raises an error if a path is not a readable folder.

    Raises:
        CheckpointError: FG601 if the path does not exist, is a file, or cannot be read.
    """
    try:
        str(folder).encode()  # safetensors cannot open a path that is not valid UTF-8
        if stat.S_ISDIR(os.stat(folder).st_mode):
            os.listdir(folder)
            return
        problem = f"{str(folder)!r} is a file, and a checkpoint is a folder"
        # The usual mistake: a file of torch.save in place of a folder.
        if folder.suffix in _PICKLES:
            problem += "; a file of torch.save is never loaded: it could run code"
    except FileNotFoundError:
        is_link = os.path.islink(folder)
        problem = f"{str(folder)!r} is a broken link" if is_link else f"there is no checkpoint folder {str(folder)!r}"
    except UnicodeEncodeError:
        problem = f"the checkpoint folder {str(folder)!r} cannot be read: its path is not valid UTF-8"
    except (OSError, ValueError) as error:
        problem = f"the checkpoint folder {str(folder)!r} cannot be read: {getattr(error, 'strerror', None) or error}"
    raise CheckpointError(
        problem, code="FG601", hint="give a folder named checkpoint-<step>, or resume_from_checkpoint: auto"
    )


def is_of_transformers(folder: Path) -> bool:
    """Returns whether transformers' `Trainer` wrote a checkpoint folder. Only the names of its files are read."""
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):
        return False
    writer = next((writer for writer, signs in _FOREIGN_FILES if _has_files(names, signs)), None)
    # Under DeepSpeed and FSDP transformers writes their files, and its own state. A manifest is of this library alone.
    return writer is not None and TRAINER_STATE in names and "manifest.json" not in names


def missing_manifest_error(folder: Path, manifest: str) -> CheckpointError:
    """Returns the FG602 or FG671 error for a folder without a manifest.

    The code is FG671 if another program wrote the folder or if it contains only a model, and FG602 if the folder is an
    incomplete checkpoint or contains checkpoints.

    Args:
        folder: the folder, which must be readable.
        manifest: the name of the manifest file, which the message gives.
    """
    # The usual mistake: the output folder in place of one of its checkpoints.
    names = os.listdir(folder)
    steps = [int(step) for name in names if (step := name.removeprefix("checkpoint-")) != name and step.isdecimal()]
    inside = [f"checkpoint-{step}" for step in sorted(steps)]
    writer = next((writer for writer, signs in _FOREIGN_FILES if _has_files(names, signs)), None)
    if writer == TRANSFORMERS:
        return CheckpointError(
            f"the checkpoint {str(folder)!r} was written by {writer}",
            code="FG671",
            hint=f"a run continues it: fgcli train --resume {folder}, or resume_from_checkpoint",
        )
    if writer is not None:
        return CheckpointError(
            f"the checkpoint {str(folder)!r} was written by {writer}, whose pickled state is never loaded",
            code="FG671",
            hint="continue with the program that wrote it, or start a new run from its weights",
        )
    # A folder with our optimizer state is an incomplete checkpoint, not a model that was saved for others.
    if _has_files(names, _MODEL_FILES) and not set(_OUR_FILES) & set(names) and not inside:
        return CheckpointError(
            f"{str(folder)!r} is a model without the state that a run needs to resume",
            code="FG671",
            hint="start a new run from it: AutoModelForCausalLM.from_pretrained loads the folder",
        )
    if inside:
        return CheckpointError(
            f"{str(folder)!r} is not a checkpoint; the newest of {len(inside)} in it is {inside[-1]!r}",
            code="FG602",
            hint=f"give one of them, as {os.path.join(folder, inside[-1])}, or set output_dir to this folder and "
            "resume_from_checkpoint: auto",
        )
    return CheckpointError(
        f"the checkpoint {str(folder)!r} has no {manifest}, so it is incomplete or was not written here",
        code="FG602",
        hint="resume from another checkpoint",
    )


def _has_files(names: list[str], signs: tuple[str, ...]) -> bool:
    return all(any(fnmatchcase(name, sign) for name in names) for sign in signs)
