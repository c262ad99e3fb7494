"""The checkpoints of a run: how they are written, and which of them stay.

Takes a `Snapshot` of every process; gives a folder that is complete. Keeps true: every process calls each method and
writes its part; rank 0 makes the folder and gives it its name, after everything in it was written and synced; a failure
of one process is one of all, and leaves nothing; a checkpoint of another run is never removed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgather.ml.checkpoint.checkpoint_dir import Draft, begin_draft, drop_draft, finish_draft, told_by_step
from forgather.ml.checkpoint.lineage import new_run, next_origin
from forgather.ml.checkpoint.manifest import FileFact
from forgather.ml.checkpoint.retention import Retention, prune
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed import collectives
from forgather.ml.trainer.args import TrainingArguments
from forgather.ml.trainer.snapshot import Snapshot


def retention_of(args: TrainingArguments) -> Retention:
    """Returns which checkpoints of a run stay.

    Who asks for the best ones alone does not want all the others.
    """
    last = 1 if args.save_total_limit is None and args.save_top_k is not None else args.save_total_limit
    return Retention(last=last, best=args.save_top_k or 1, every=args.keep_every_n_steps)


class Checkpoints:
    """The checkpoints that a run writes into a folder.

    Args:
        output_dir: where they lie.
        storage: makes the changes.
        retention: which stay.
        max_steps: updates that the run is to take.
        facts: what each manifest says beside, see `Manifest`.
    """

    def __init__(
        self, output_dir: Path, storage: Storage, *, retention: Retention, max_steps: int, facts: Mapping[str, Any]
    ) -> None:
        self.output_dir = output_dir
        self.storage = storage
        self.run_id = new_run()
        self._retention = retention
        self._max_steps = max_steps
        self._facts = dict(facts)

    def write(self, snapshot: Snapshot, *, ranked: Sequence[int] = ()) -> Path:
        """Writes a checkpoint, removes surplus ones and returns its folder.

        Args:
            snapshot: of this process.
            ranked: steps that were evaluated, the best first.

        Raises:
            CheckpointError: FG609 where the disk refuses, on every process; earlier checkpoints are untouched.
        """
        folder = collectives.by_writer(functools.partial(self._begin, snapshot.step))
        draft = Draft(self.storage, folder)
        try:
            parts = collectives.by_all(functools.partial(self._fill, draft, snapshot))
        except Exception:  # of any process: all are here
            collectives.by_writer(functools.partial(drop_draft, draft))  # all have stopped writing into it
            raise
        files = {name: fact for part in parts for name, fact in part.items()}
        return collectives.by_writer(functools.partial(self._finish, draft, snapshot.step, files, ranked))

    def _begin(self, step: int) -> Path:
        with told_by_step(self.output_dir, step):
            return begin_draft(self.storage, self.output_dir, step).folder

    def _fill(self, draft: Draft, snapshot: Snapshot) -> dict[str, FileFact]:
        with told_by_step(self.output_dir, snapshot.step):
            snapshot.write(draft)
        return draft.files

    def _finish(self, draft: Draft, step: int, files: Mapping[str, FileFact], ranked: Sequence[int]) -> Path:
        try:
            origin = next_origin(self.output_dir, self.run_id, self._max_steps)
            with told_by_step(self.output_dir, step):
                folder = finish_draft(self.storage, draft.folder, step, files, {**self._facts, "run": origin})
        finally:
            drop_draft(draft)
        prune(self.output_dir, self._retention, ranked=ranked, newest=folder, run=self.run_id, storage=self.storage)
        return folder
