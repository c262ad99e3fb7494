"""The checkpoints of a run: how they are written, and which of them stay.

Takes a `Snapshot` of every process; gives a folder that is complete. Keeps true: every process calls each method and
writes its part; rank 0 makes the folder and gives it its name, after everything in it was written and synced; a failure
of one process is one of all, and leaves nothing; a checkpoint of another run is never removed.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.checkpoint_dir import Draft, begin_draft, drop_draft, finish_draft, told_by_step
from forgather.ml.checkpoint.lineage import new_run, next_origin
from forgather.ml.checkpoint.manifest import FileFact
from forgather.ml.checkpoint.retention import Retention, prune
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.trainer.arguments import TrainingArguments
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
        folder = collectives.run_on_main(functools.partial(self._begin, snapshot.step))
        draft = Draft(self.storage, folder)
        try:
            parts = collectives.by_all(functools.partial(self._fill, draft, snapshot))
        except Exception:  # of any process: all are here
            collectives.run_on_main(functools.partial(drop_draft, draft))  # all have stopped writing into it
            raise
        files = {name: fact for part in parts for name, fact in part.items()}
        return collectives.run_on_main(functools.partial(self._finish, draft, snapshot.step, files, ranked))

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


class Staging:
    """Buffers by file and key."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Returns the snapshot with tensors of its own, on the host; it waits until they are there."""
        held = {(file, key): tensor for file, tensors in snapshot.tensors.items() for key, tensor in tensors.items()}
        self._buffers = {place: self._filled(place, tensor) for place, tensor in held.items()}
        for device in {tensor.device for tensor in held.values() if tensor.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in snapshot.tensors}
        for (file, key), buffer in self._buffers.items():
            copies[file][key] = buffer
        return dataclasses.replace(snapshot, tensors=copies)

    def _filled(self, place: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return buffer.copy_(tensor.detach(), non_blocking=True)


_log = get_logger(__name__)

# More than there are processes, and small enough to be added up.
_FAILED = 65536.0


class Background:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._channel = collectives.second_channel()
        self._pending: _Act | None = None
        self._has_waited = False

    def write(self, snapshot: Snapshot, write: Callable[[Snapshot], None]) -> None:
        """Begins to write a checkpoint; the one before is settled.

        Args:
            snapshot: of this process.
            write: does it, together with the other processes.
        """
        copy = self._staging.copy(snapshot)
        self._pending = _Act(snapshot.step, functools.partial(self._write, write, copy))

    def _write(self, write: Callable[[Snapshot], None], snapshot: Snapshot) -> None:
        with collectives.through(self._channel):
            write(snapshot)

    def settled(self, *, wait: bool) -> bool:
        """Tells, on every process alike, whether the checkpoint is complete; every process asks after the same steps.

        Args:
            wait: for it.

        Raises:
            CheckpointError: it failed, see `Checkpoints.write`.
        """
        act = self._pending
        if act is None:
            return False
        told = 0.0
        if not wait:
            told = collectives.total(act.status)
            if told < collectives.size():  # as many as there are processes: all are done
                return False
        elif not act.is_done and not self._has_waited:
            self._has_waited = True
            _log.warning("waiting until the checkpoint of step %d is written", act.step)
        self._pending = None
        act.finish()
        if told >= _FAILED:
            raise CheckpointError(
                f"the checkpoint of step {act.step} could not be written by another process",
                code="FG609",
                hint="what that process says itself comes first; earlier checkpoints are untouched",
            )
        return True

    def leave(self) -> None:
        """Waits for what is being written, whatever other processes do.

        Raises:
            CheckpointError: it failed.
        """
        act, self._pending = self._pending, None
        if act is not None:
            act.finish()


class _Act:
    """What a thread does."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step = step
        self._act = act
        self._error: BaseException | None = None
        # A daemon: a run that is told to stop at once does not wait for it.
        self._thread = threading.Thread(target=self._run, name="forgather-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:  # noqa: BLE001 - the border of a thread: the run raises it
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def status(self) -> float:
        if not self.is_done:
            return 0.0
        return 1.0 if self._error is None else _FAILED

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
