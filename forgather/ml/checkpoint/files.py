"""File names of checkpoints and model folders, which part of a run each file holds, and names of other programs.

Every name is defined here only. The module does not import torch, so commands that only list folders use the same
names as the code that writes them. `require_folder` and `missing_manifest_error` give the errors for folders that are
not checkpoints of this library, with a guess at which program wrote them. They look at names only and open nothing:
another program's checkpoint may be a pickle, and unpickling runs code.
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
"""File name stems of whole weights (as `from_pretrained` expects), sharded weights and non-tensor model state."""

WEIGHTS, WEIGHTS_INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
"""The files that `from_pretrained` looks for in a folder."""

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files that peft looks for in a folder."""

INDEX = "index.json"
"""The file that maps each tensor of a checkpoint to the file and key of each of its chunks."""

TRAINER_STATE, TRAINING_ARGS = "trainer_state.json", "training_args.json"
"""Progress of the run and its arguments, in the layout of transformers; people and tools of transformers read them."""

TRAINING_STATE = "training_state"
"""Stem of the files that hold the LR schedule, the data position, the random states and the loss meter."""

OPTIMIZER, SCHEDULE, DATA, RNG, METER, PROGRESS = "optimizer", "schedule", "data", "rng", "meter", "progress"
"""The parts of a checkpoint next to the weights, by the names that `--allow-missing` accepts."""

IN_TRAINING_STATE = (SCHEDULE, DATA, RNG, METER)
RESUME_PARTS = (OPTIMIZER, *IN_TRAINING_STATE)
"""The parts that a checkpoint with `save_only_model` does not have."""

CUSTOM = "custom"
"""The folder that holds the files of a user's `save_function`."""


def parts_in(name: str) -> tuple[str, ...]:
    """Returns the parts of the training state in a checkpoint file; empty for a file that a resume always needs."""
    if name == TRAINER_STATE:
        return (PROGRESS,)
    # With the dot, so that `training_state.json` and `training_state.safetensors` match and nothing else.
    if name.startswith(f"{TRAINING_STATE}."):
        return IN_TRAINING_STATE
    return (OPTIMIZER,) if name.startswith(OPTIMIZER) else ()


def as_json(value: Any) -> bytes:
    """Returns JSON-compatible data as the bytes of an indented JSON file."""
    return (json.dumps(value, indent=1) + "\n").encode()


# The program that wrote a folder, by file name patterns that must all match; the first matching row decides.
_FOREIGN_FILES = (
    ("torch.distributed.checkpoint", (".metadata", "*.distcp")),
    ("DeepSpeed", ("latest", "global_step*")),
    ("DeepSpeed", ("*mp_rank_*_model_states.pt",)),
    ("the Trainer of transformers", ("trainer_state.json", "*.pt")),
    ("the Trainer of transformers", ("trainer_state.json", "training_args.bin")),
    ("accelerator.save_state()", ("random_states_*.pkl",)),
)
_MODEL_FILES = ("config.json", "*model*.safetensors")
_OUR_FILES = ("training_state.json", "optimizer.json", "optimizer.safetensors")
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def require_folder(folder: Path) -> None:
    """Raises an error unless a path is a readable folder.

    Raises:
        CheckpointError: FG601.
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


def missing_manifest_error(folder: Path, manifest: str) -> CheckpointError:
    """Returns the error for a folder without a manifest: another program wrote it, or it is incomplete.

    Args:
        folder: a readable folder.
        manifest: name of the manifest file, for the message.
    """
    # The usual mistake: the output folder in place of one of its checkpoints.
    names = os.listdir(folder)
    steps = [int(step) for name in names if (step := name.removeprefix("checkpoint-")) != name and step.isdecimal()]
    inside = [f"checkpoint-{step}" for step in sorted(steps)]
    writer = next((writer for writer, signs in _FOREIGN_FILES if _has_files(names, signs)), None)
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
