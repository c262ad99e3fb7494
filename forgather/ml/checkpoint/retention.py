"""Retention: which checkpoints are kept, and removal of the others after a save or by `fgcli ckpt prune`.

The newest checkpoints, the best ones, and those whose step is a multiple of `every` are kept. Nothing is removed before
one of the remaining checkpoints is known to be intact. `prune` runs after each save of a run. It does not remove
checkpoints of other runs, and it logs a failed removal, which is tried again after the next save.
`checkpoints_to_prune`, `require_intact_checkpoint` and `remove_checkpoint` are the steps of the command, which neither
counts nor removes incomplete checkpoints and drafts. The module does not import torch.
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
    """The rule that determines which checkpoints are kept.

    Args:
        last: the maximum number of checkpoints; None keeps all. The newest checkpoint and the best ones are included in
            this number and are always kept.
        best: the number of best checkpoints to keep.
        every: the interval in optimizer steps of checkpoints that are kept for ever and are not included in `last`.
            None means that there are no such checkpoints.
    """

    last: int | None = None
    best: int = 1
    every: int | None = None

    def keeps_for_ever(self, step: int) -> bool:
        """Returns whether the checkpoint of a step is never removed because the step is a multiple of `every`."""
        return self.every is not None and step % self.every == 0

    def surplus(self, steps: Sequence[int], ranked: Sequence[int] = ()) -> list[int]:
        """Returns the steps of the checkpoints to remove.

        Args:
            steps: the steps of the existing checkpoints, in the order in which they were written.
            ranked: the steps that were evaluated, best first.

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
        retention: the rule that determines which checkpoints are kept.
        ranked: the steps that were evaluated, best first.
        newest: the checkpoint that was just written and is known to be intact. If it is None, the manifests determine
            which checkpoint is the newest, and one of the remaining checkpoints is verified before any is removed.
        run: the id of the run whose checkpoints are counted and removed; None includes all runs.
        storage: the object through which files are removed; the local file system by default.
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
    """Returns the checkpoints to remove, oldest first. Incomplete checkpoints are neither counted nor removed.

    Args:
        summary: the summary of the checkpoints in the output folder.
        last: the number of newest checkpoints to keep; None keeps one.
        best: the number of best checkpoints to keep; None keeps one.
        every: the interval in optimizer steps of checkpoints that are kept in addition, or None.

    Raises:
        CheckpointError: FG678 if `best` is given and no checkpoint has a metric.
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
    """Raises an error if none of the checkpoints that would remain is intact.

    Args:
        summary: the summary of the checkpoints in the output folder.
        gone: the checkpoints that will be removed; if there are none, nothing is checked.

    Raises:
        CheckpointError: FG678 if no remaining checkpoint is intact.
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
    """Removes a checkpoint. Files that cannot be deleted stay in a hidden folder, which a later save removes.

    Args:
        found: the summary of the checkpoint.
        storage: the object through which files are removed; the local file system by default.

    Raises:
        CheckpointError: FG678 if the folder cannot be renamed.
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
