"""The checkpoints of a run: how they are written, and which of them stay.

Takes a `Snapshot` of every process; gives a folder that is complete. Keeps true: every process calls each method and
writes its part; rank 0 makes the folder and gives it its name, after everything in it was written and synced; a failure
of one process is one of all, and leaves nothing; a checkpoint of another run is never removed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgather.ml.checkpoint.folders import Draft, begin_draft, drop_draft, finish_draft, told_by_step
from forgather.ml.checkpoint.lineage import new_run, next_origin
from forgather.ml.checkpoint.manifest import FileFact
from forgather.ml.checkpoint.retention import prune
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed import agreement
from forgather.ml.trainer.snapshot import Snapshot


class Checkpoints:
    """The checkpoints that a run writes into a folder.

    Args:
        output_dir: where they lie.
        storage: makes the changes.
        limit: how many stay; None for all.
        max_steps: updates that the run is to take.
        facts: what each manifest says beside, see `Manifest`.
    """

    def __init__(
        self, output_dir: Path, storage: Storage, *, limit: int | None, max_steps: int, facts: Mapping[str, Any]
    ) -> None:
        self.output_dir = output_dir
        self.storage = storage
        self.run_id = new_run()
        self._limit = limit
        self._max_steps = max_steps
        self._facts = dict(facts)

    def write(self, snapshot: Snapshot, *, best: Path | None) -> Path:
        """Writes a checkpoint, removes surplus ones and returns its folder.

        Args:
            snapshot: of this process.
            best: the checkpoint that stays whatever its age.

        Raises:
            CheckpointError: FG609 where the disk refuses, on every process; earlier checkpoints are untouched.
        """
        folder = agreement.by_writer(functools.partial(self._begin, snapshot.step))
        draft = Draft(self.storage, folder)
        try:
            parts = agreement.by_all(functools.partial(self._fill, draft, snapshot))
        except BaseException:
            agreement.by_writer(functools.partial(drop_draft, draft))  # all have stopped writing into it
            raise
        files = {name: fact for part in parts for name, fact in part.items()}
        return agreement.by_writer(functools.partial(self._finish, draft, snapshot.step, files, best))

    def _begin(self, step: int) -> Path:
        with told_by_step(self.output_dir, step):
            return begin_draft(self.storage, self.output_dir, step).folder

    def _fill(self, draft: Draft, snapshot: Snapshot) -> dict[str, FileFact]:
        with told_by_step(self.output_dir, snapshot.step):
            snapshot.write(draft)
        return draft.files

    def _finish(self, draft: Draft, step: int, files: Mapping[str, FileFact], best: Path | None) -> Path:
        try:
            origin = next_origin(self.output_dir, self.run_id, self._max_steps)
            with told_by_step(self.output_dir, step):
                folder = finish_draft(self.storage, draft.folder, step, files, {**self._facts, "run": origin})
        finally:
            drop_draft(draft)
        prune(self.output_dir, self._limit, best=best, newest=folder, run=self.run_id, storage=self.storage)
        return folder
