"""Retention: which checkpoints are kept, and removal of the others after a save or by `fgcli ckpt prune`.

The newest, the best and the `every`-th checkpoints are kept. Nothing is removed before one of the remaining checkpoints
is known to be intact. `prune` runs after each save: it leaves checkpoints of other runs alone, and a failed removal is
logged and tried again after the next save. `checkpoints_to_prune`, `require_intact_checkpoint` and `remove_checkpoint`
are the steps of the command; incomplete checkpoints and drafts are neither counted nor removed. The module does not
import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.checkpoint_dir import discard_folder, step_of
from forgather.ml.checkpoint.inspect import CheckpointSummary, FolderSummary
from forgather.ml.checkpoint.lineage import checkpoints_in_order
from forgather.ml.checkpoint.manifest import first_intact
from forgather.ml.checkpoint.storage import LocalStorage, Storage

# The standard logger, not the rank-aware one, which imports torch: only the main process prunes.
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule for which checkpoints are kept.

    Args:
        last: maximum number of checkpoints; None for all. The newest and the best count towards it, but are always
            kept.
        best: how many of the best by metric to keep.
        every: checkpoints whose step is a multiple of this are kept for ever and are not counted; None for none.

    Units:
        `every` counts optimizer steps.
    """

    last: int | None = None
    best: int = 1
    every: int | None = None

    def keeps_for_ever(self, step: int) -> bool:
        """Returns True for the step of a checkpoint that is never removed."""
        return self.every is not None and step % self.every == 0

    def surplus(self, steps: Sequence[int], ranked: Sequence[int] = ()) -> list[int]:
        """Returns the steps whose checkpoints are to be removed.

        Args:
            steps: of the existing checkpoints, in the order in which they were written.
            ranked: steps that were evaluated, the best first.

        Example:
            >>> Retention(last=2, best=1, every=100).surplus([100, 150, 170, 180, 190], ranked=[150, 170])
            [170, 180]
        """
        if self.last is None:
            return []
        counted = [step for step in steps if not self.keeps_for_ever(step)]
        best = [step for step in ranked if step in steps][: self.best]
        # The last in the order of writing, not the highest step: a resumed run may have gone back.
        kept = {*best, *steps[-1:]}
        return [step for step in counted if step not in kept][: max(0, len(counted) - self.last)]


def prune(
    output_dir: Path,
    retention: Retention,
    *,
    ranked: Sequence[int] = (),
    newest: Path | None = None,
    run: str | None = None,
    storage: Storage | None = None,
) -> list[Path]:
    """Removes the checkpoints that a retention rule does not keep, and returns their folders.

    Args:
        output_dir: the folder that contains the checkpoints.
        retention: the rule.
        ranked: steps that were evaluated, the best first.
        newest: the checkpoint that was just written and is known to be intact. By default it is the one that was
            written last according to the manifests, and one of the remaining checkpoints is verified before anything is
            removed.
        run: count and remove checkpoints of this run only; None for all runs.
        storage: makes the changes; the file system by default.
    """
    folders = {
        step_of(folder): folder for folder, origin in checkpoints_in_order(output_dir) if run in (None, origin.run)
    }
    # Moved to the end: a save that replaced a checkpoint of a smaller step is still the newest one.
    if newest is not None and step_of(newest) in folders:
        folders[step_of(newest)] = folders.pop(step_of(newest))
    gone = [folders[step] for step in retention.surplus(list(folders), ranked)]
    # Otherwise a run could delete its only intact checkpoint and keep a damaged one.
    if gone and newest is None:
        intact, wrong = first_intact(folder for folder in reversed(folders.values()) if folder not in gone)
        for error in wrong.values():
            _log.warning("%s", error.message)
        if intact is None:
            _log.warning("no checkpoint was removed from %s: none of those that would remain is intact", output_dir)
            return []
    return [folder for folder in gone if _is_removed(folder, storage or LocalStorage())]


def _is_removed(folder: Path, storage: Storage) -> bool:
    try:
        discard_folder(storage, folder)
    # A warning: the new checkpoint is complete, and the run must not end because an old one could not be removed.
    except OSError as error:
        _log.warning("the old checkpoint %s could not be removed: %s", folder, error)
        return False
    return True


def checkpoints_to_prune(
    summary: FolderSummary, *, last: int | None, best: int | None, every: int | None
) -> list[CheckpointSummary]:
    """Returns the checkpoints to remove, the oldest first; incomplete ones are neither counted nor removed.

    Args:
        summary: the checkpoints of the output folder.
        last: how many of the newest to keep; 1 when only `best` or `every` is given.
        best: how many of the best by metric to keep.
        every: keep each checkpoint whose step is a multiple of this number.

    Units:
        `every` counts optimizer steps.

    Raises:
        CheckpointError: FG678 when `best` is given and no checkpoint has a metric.
    """
    if best and not summary.ranked:
        raise CheckpointError(
            f"no checkpoint in {str(summary.folder)!r} has a metric, so the best ones are not known",
            code="FG678",
            hint="give --keep-last N for the newest; a checkpoint has a metric if metric_for_best_model is set and its "
            "step was evaluated",
        )
    # An incomplete checkpoint must not take the place of one that can be resumed.
    complete = {found.step: found for found in summary.checkpoints if found.problem is None}
    for_ever = Retention(every=every)
    # `last or 1`: the newest one is kept even if only the best ones were asked for.
    kept = set(list(complete)[-(last or 1) :]) | set(summary.ranked[: best or 1])
    return [found for step, found in complete.items() if step not in kept and not for_ever.keeps_for_ever(step)]


def require_intact_checkpoint(summary: FolderSummary, gone: list[CheckpointSummary]) -> None:
    """Raises an error unless at least one of the checkpoints that would remain is intact.

    Args:
        summary: the checkpoints of the output folder.
        gone: the checkpoints that are going to be removed.

    Raises:
        CheckpointError: FG678.
    """
    if not gone:
        return
    # The newest first: it is the likeliest to be wanted, and verification stops at the first intact one.
    staying = [found for found in reversed(summary.checkpoints) if found not in gone and found.problem is None]
    intact, wrong = first_intact(found.folder for found in staying)
    if intact is None:
        raise CheckpointError(
            f"nothing is removed from {str(summary.folder)!r}: no checkpoint that would remain is intact"
            + "".join(f"; {error.message}" for error in [*wrong.values()][:1]),
            code="FG678",
            hint=f"'fgcli ckpt verify {summary.folder}' lists the problems of each; keep more of them",
        )


def remove_checkpoint(found: CheckpointSummary, storage: Storage | None = None) -> None:
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
            hint="change the permissions of the folder",
        ) from error
