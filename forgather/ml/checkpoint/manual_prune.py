"""Checkpoints that are removed by hand.

Takes what lies in an output folder and how many stay; gives those that go. Keeps true: the newest and the best complete
ones stay, whatever was asked for; nothing goes before one that stays was read, every byte of it; what is being written
is not looked at; no torch is imported.
"""

from __future__ import annotations

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.checkpoint_dir import discard_folder
from forgather.ml.checkpoint.inspect import Survey, Surveyed
from forgather.ml.checkpoint.manifest import first_intact
from forgather.ml.checkpoint.retention import Retention
from forgather.ml.checkpoint.storage import LocalStorage, Storage


def surplus_of(survey: Survey, *, last: int | None, best: int | None, every: int | None) -> list[Surveyed]:
    """Returns the checkpoints that go, the oldest first; one that is not complete neither counts nor goes.

    Args:
        survey: of the folder.
        last: how many of the newest stay; 1 where something else is asked for.
        best: how many of the best by their metric stay.
        every: those of every so many steps stay.

    Raises:
        CheckpointError: FG678 where the best are to stay and none is known.
    """
    if best and not survey.ranked:
        raise CheckpointError(
            f"no checkpoint in {str(survey.folder)!r} has a metric, so nobody knows which ones are the best",
            code="FG678",
            hint="give --keep-last N for the newest; a run with metric_for_best_model among its trainer's arguments, "
            "and an evaluation at the steps that are saved, writes checkpoints that have one",
        )
    complete = {found.step: found for found in survey.checkpoints if found.problem is None}
    for_ever = Retention(every=every)
    kept = set(list(complete)[-(last or 1) :]) | set(survey.ranked[: best or 1])
    return [found for step, found in complete.items() if step not in kept and not for_ever.keeps_for_ever(step)]


def refuse_to_leave_none(survey: Survey, gone: list[Surveyed]) -> None:
    """Raises where none of the checkpoints that would stay is intact.

    Raises:
        CheckpointError: FG678.
    """
    if not gone:
        return
    staying = [found for found in reversed(survey.checkpoints) if found not in gone and found.problem is None]
    intact, wrong = first_intact(found.folder for found in staying)
    if intact is None:
        raise CheckpointError(
            f"nothing is removed from {str(survey.folder)!r}: no checkpoint that would stay is intact"
            + "".join(f"; {error.message}" for error in [*wrong.values()][:1]),
            code="FG678",
            hint=f"'fgcli ckpt verify {survey.folder}' tells what is wrong with each; keep more of them",
        )


def remove(found: Surveyed, storage: Storage | None = None) -> None:
    """Removes a checkpoint.

    Raises:
        CheckpointError: FG678 where the disk refuses; what is left is out of sight, and the next save removes it.
    """
    try:
        discard_folder(storage or LocalStorage(), found.folder)
    except FileNotFoundError:
        return  # a run that goes on has removed it meanwhile
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {str(found.folder)!r} cannot be removed: {error.strerror or error}",
            code="FG678",
            hint="change who may write there",
        ) from error
