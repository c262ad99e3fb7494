"""Errors for folders and files that are not checkpoints of this library, with a guess at which program wrote them.
 Only file names are inspected. Nothing is opened: another program's checkpoint may be a pickle, and unpickling runs
code.
"""

from __future__ import annotations

import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path

from forgather.errors import CheckpointError

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
            problem += "; what torch.save wrote is never loaded: it could run code"
    except FileNotFoundError:
        is_link = os.path.islink(folder)
        problem = (
            f"{str(folder)!r} is a link to nothing" if is_link else f"there is no checkpoint folder {str(folder)!r}"
        )
    except UnicodeEncodeError:
        problem = f"the checkpoint folder {str(folder)!r} cannot be read: its path is no UTF-8"
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
    names = os.listdir(folder)
    steps = [int(step) for name in names if (step := name.removeprefix("checkpoint-")) != name and step.isdecimal()]
    inside = [f"checkpoint-{step}" for step in sorted(steps)]
    writer = next((writer for writer, signs in _FOREIGN_FILES if _has_files(names, signs)), None)
    if writer is not None:
        return CheckpointError(
            f"the checkpoint {str(folder)!r} was written by {writer}, and such state is never loaded: it is pickled",
            code="FG671",
            hint="go on with the program that wrote it, or begin a new run from its weights",
        )
    # A folder with our optimizer state is an incomplete checkpoint, not a model that was saved for others.
    if _has_files(names, _MODEL_FILES) and not set(_OUR_FILES) & set(names) and not inside:
        return CheckpointError(
            f"{str(folder)!r} is a model, without what a run needs to go on",
            code="FG671",
            hint="begin a new run from it: AutoModelForCausalLM.from_pretrained takes the folder",
        )
    if inside:
        return CheckpointError(
            f"{str(folder)!r} is no checkpoint; it holds {len(inside)}, among them {inside[-1]!r}",
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
