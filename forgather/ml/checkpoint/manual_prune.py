"""Manual pruning of checkpoints (`fgcli ckpt prune`).

Takes the checkpoints of an output folder and how many to keep; gives the checkpoints to remove, and removes them.
The newest and the best complete checkpoint are always kept. Nothing is removed before at least one of the remaining
checkpoints was verified byte by byte. Drafts that are being written are ignored. The module does not import torch.
"""

from __future__ import annotations

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.checkpoint_dir import discard_folder
from forgather.ml.checkpoint.inspect import Survey, Surveyed
from forgather.ml.checkpoint.manifest import first_intact
from forgather.ml.checkpoint.retention import Retention
from forgather.ml.checkpoint.storage import LocalStorage, Storage


def checkpoints_to_prune(survey: Survey, *, last: int | None, best: int | None, every: int | None) -> list[Surveyed]:
    """Returns the checkpoints to remove, the oldest first; incomplete ones are neither counted nor removed.

    Args:
        survey: the checkpoints of the output folder.
        last: how many of the newest to keep; 1 when only `best` or `every` is given.
        best: how many of the best by metric to keep.
        every: keep each checkpoint whose step is a multiple of this number.

    Units:
        `every` counts optimizer steps.

    Raises:
        CheckpointError: FG678 when `best` is given and no checkpoint has a metric.
    """
    if best and not survey.ranked:
        raise CheckpointError(
            f"no checkpoint in {str(survey.folder)!r} has a metric, so nobody knows which ones are the best",
            code="FG678",
            hint="give --keep-last N for the newest; a run with metric_for_best_model among its trainer's arguments, "
            "and an evaluation at the steps that are saved, writes checkpoints that have one",
        )
    # An incomplete checkpoint must not take the place of one that can be resumed.
    complete = {found.step: found for found in survey.checkpoints if found.problem is None}
    for_ever = Retention(every=every)
    kept = set(list(complete)[-(last or 1) :]) | set(survey.ranked[: best or 1])
    return [found for step, found in complete.items() if step not in kept and not for_ever.keeps_for_ever(step)]


def require_intact_checkpoint(survey: Survey, gone: list[Surveyed]) -> None:
    """Raises an error unless at least one of the checkpoints that would remain is intact.

    Args:
        survey: the checkpoints of the output folder.
        gone: the checkpoints that are going to be removed.

    Raises:
        CheckpointError: FG678.
    """
    if not gone:
        return
    # The newest first: it is the likeliest to be wanted, and verification stops at the first intact one.
    staying = [found for found in reversed(survey.checkpoints) if found not in gone and found.problem is None]
    intact, wrong = first_intact(found.folder for found in staying)
    if intact is None:
        raise CheckpointError(
            f"nothing is removed from {str(survey.folder)!r}: no checkpoint that would stay is intact"
            + "".join(f"; {error.message}" for error in [*wrong.values()][:1]),
            code="FG678",
            hint=f"'fgcli ckpt verify {survey.folder}' tells what is wrong with each; keep more of them",
        )


def remove_checkpoint(found: Surveyed, storage: Storage | None = None) -> None:
    """Removes a checkpoint; files that cannot be deleted are hidden from readers, and the next save removes them.

    Args:
        found: the checkpoint.
        storage: makes the changes; the file system by default.

    Raises:
        CheckpointError: FG678 when the file system refuses to rename the folder.
    """
    try:
        discard_folder(storage or LocalStorage(), found.folder)
    except FileNotFoundError:
        return  # a run that is still training has removed it in the meantime
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {str(found.folder)!r} cannot be removed: {error.strerror or error}",
            code="FG678",
            hint="change who may write there",
        ) from error
