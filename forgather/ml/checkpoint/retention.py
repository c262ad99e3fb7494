"""Automatic pruning: which checkpoints of a run are kept, and removal of the others after a save.

The newest, the best and the `every`-th checkpoints are kept, and so are those of other runs. Nothing is removed before
one of the remaining checkpoints is known to be intact. A failed removal is logged and tried again after the next save.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forgather.ml.checkpoint.checkpoint_dir import discard_folder, step_of
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
            _log.warning("no checkpoint was removed from %s: none of those that would stay is intact", output_dir)
            return []
    return [folder for folder in gone if _is_removed(folder, storage or LocalStorage())]


def _is_removed(folder: Path, storage: Storage) -> bool:
    try:
        discard_folder(storage, folder)
    except OSError as error:
        _log.warning("the old checkpoint %s could not be removed: %s", folder, error)
        return False
    return True
