"""Which checkpoints stay.

Takes an output folder, a limit and the best checkpoint; removes the oldest others. Keeps true: the newest and the
best always stay, whatever the limit, and so does what another run wrote; a removal that fails is said and tried
again later.
"""

from __future__ import annotations

import logging
from pathlib import Path

from forgather.ml.checkpoint.folders import discard_folder
from forgather.ml.checkpoint.lineage import in_order
from forgather.ml.checkpoint.storage import LocalStorage, Storage

# Reading and pruning need no torch, which knows the rank: only one process prunes.
_log = logging.getLogger(__name__)


def prune(
    output_dir: Path,
    limit: int | None,
    *,
    best: Path | None = None,
    newest: Path | None = None,
    run: str | None = None,
    storage: Storage | None = None,
) -> list[Path]:
    """Returns the folders that were removed so that at most `limit` remain.

    Args:
        output_dir: where checkpoints lie.
        limit: how many may stay; None for all. The best one may make it one more.
        best: never removed.
        newest: the one written last, never removed; by default the one whose manifest says so.
        run: the checkpoints of this run alone count and are removed; None for all.
        storage: makes the changes; the file system by default.
    """
    if limit is None:
        return []
    folders = [folder for folder, origin in in_order(output_dir) if run is None or origin.run == run]
    if newest is not None and newest in folders:
        folders.remove(newest)
        folders.append(newest)
    kept = {folder.resolve() for folder in [best, folders[-1] if folders else None] if folder is not None}
    surplus = len(folders) - limit
    removed = []
    for folder in folders:
        if surplus <= 0:
            break
        if folder.resolve() in kept:
            continue
        try:
            discard_folder(storage or LocalStorage(), folder)
        except OSError as error:
            _log.warning("the old checkpoint %s could not be removed: %s", folder, error)
            continue
        removed.append(folder)
        surplus -= 1
    return removed
