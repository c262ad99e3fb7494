"""Which checkpoints stay.

Takes an output folder and a `Retention`; removes what it does not keep. Keeps true: the newest stays, and so do the
best, those that are kept for ever, and what another run wrote; nothing is removed before a checkpoint that stays is
known to be whole; a removal that fails is said and tried again after the next save.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forgather.ml.checkpoint.checkpoint_dir import discard_folder, step_of
from forgather.ml.checkpoint.lineage import in_order
from forgather.ml.checkpoint.manifest import first_intact
from forgather.ml.checkpoint.storage import LocalStorage, Storage

# Reading and pruning need no torch, which knows the rank: only one process prunes.
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """How many checkpoints stay.

    Args:
        last: how many at most; None for all. The newest, and the best ones, count and stay whatever the number.
        best: how many of the best, by their metric.
        every: those of every so many steps stay for ever, and do not count; None for none.
    """

    last: int | None = None
    best: int = 1
    every: int | None = None

    def keeps_for_ever(self, step: int) -> bool:
        """Tells whether the checkpoint of a step is never removed."""
        return self.every is not None and step % self.every == 0

    def surplus(self, steps: Sequence[int], ranked: Sequence[int] = ()) -> list[int]:
        """Returns the steps whose checkpoints are to be removed.

        Args:
            steps: of the checkpoints, in the order of writing.
            ranked: steps that were evaluated, the best first.

        Example:
            >>> Retention(last=2, best=1, every=100).surplus([100, 150, 170, 180, 190], ranked=[150, 170])
            [170, 180]
        """
        if self.last is None:
            return []
        counted = [step for step in steps if not self.keeps_for_ever(step)]
        best = [step for step in ranked if step in steps][: self.best]
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
    """Returns the folders that were removed.

    Args:
        output_dir: where checkpoints lie.
        retention: how many stay.
        ranked: steps that were evaluated, the best first.
        newest: the one that was just written and is known to be whole; by default the one whose manifest says that it
            was written last, and of those that stay one is verified first.
        run: the checkpoints of this run alone count and are removed; None for all.
        storage: makes the changes; the file system by default.
    """
    folders = {step_of(folder): folder for folder, origin in in_order(output_dir) if run in (None, origin.run)}
    if newest is not None and step_of(newest) in folders:
        folders[step_of(newest)] = folders.pop(step_of(newest))
    gone = [folders[step] for step in retention.surplus(list(folders), ranked)]
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
