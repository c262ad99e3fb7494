"""Writes the checkpoints of a run, in the foreground or in the background, and estimates the disk space they need.

Every process calls the writer with its own `Snapshot` and writes its own files into one folder. The main process
creates the folder under a temporary name and renames it after all files were written and synced. If one process fails,
the save fails on all processes and the folder is removed. Checkpoints of other runs are never removed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather.errors import CheckpointError
from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.checkpoint_dir import (
    Draft,
    begin_draft,
    checkpoint_write_errors,
    discard_draft,
    finish_draft,
)
from forgather.ml.checkpoint.lineage import new_run, next_origin
from forgather.ml.checkpoint.manifest import FileFact, Manifest
from forgather.ml.checkpoint.retention import Retention, prune
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.number_format import format_bytes
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.snapshot import Snapshot
from forgather.ml.trainer.staging import Staging


def retention_of(args: TrainingArguments) -> Retention:
    """Returns the rules that determine which checkpoints of a run are kept.

    With `save_top_k` and without `save_total_limit`, only the best checkpoints and the newest one are kept.
    """
    last = 1 if args.save_total_limit is None and args.save_top_k is not None else args.save_total_limit
    return Retention(last=last, best=args.save_top_k or 1, every=args.keep_every_n_steps)


class CheckpointWriter:
    """Writes the checkpoints of one run, and removes those that are no longer needed.

    Args:
        output_dir: the folder that contains the `checkpoint-<step>` folders.
        storage: the object through which files are written and removed.
        retention: the rules that determine which checkpoints are kept.
        max_steps: the number of optimizer steps of the whole run.
        facts: further entries of each manifest, see `Manifest`.
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

    def inherit(self, manifest: Manifest) -> None:
        """Takes over from the checkpoint of an earlier part of the run how the weights of step 0 were made."""
        self._facts.pop("initial_weights", None)
        if (made := manifest.facts.get("initial_weights")) is not None:
            self._facts["initial_weights"] = made

    def write(self, snapshot: Snapshot, *, ranked: Sequence[int] = ()) -> Path:
        """Writes a checkpoint, removes checkpoints that are no longer needed, and returns the folder of the new one.

        Collective: every process must call it, and it waits for all processes.

        Args:
            snapshot: the snapshot of the calling process.
            ranked: the steps that were evaluated, best first.

        Raises:
            CheckpointError: FG609, on every process, if one process cannot write a file. Earlier checkpoints do not
                change.
        """
        folder = collectives.run_on_main(functools.partial(self._begin, snapshot.step))
        draft = Draft(self.storage, folder)
        try:
            parts = collectives.run_and_gather(functools.partial(self._fill, draft, snapshot))
        except Exception:  # `run_and_gather` raises on every process, so all of them take part in what follows
            collectives.run_on_main(functools.partial(discard_draft, draft))  # no process writes into it any more
            raise
        files = {name: fact for part in parts for name, fact in part.items()}
        return collectives.run_on_main(functools.partial(self._finish, draft, snapshot.step, files, ranked))

    def _begin(self, step: int) -> Path:
        with checkpoint_write_errors(self.output_dir, step):
            return begin_draft(self.storage, self.output_dir, step).folder

    def _fill(self, draft: Draft, snapshot: Snapshot) -> dict[str, FileFact]:
        with checkpoint_write_errors(self.output_dir, snapshot.step):
            snapshot.write(draft)
        return draft.files

    def _finish(self, draft: Draft, step: int, files: Mapping[str, FileFact], ranked: Sequence[int]) -> Path:
        try:
            origin = next_origin(self.output_dir, self.run_id, self._max_steps)
            with checkpoint_write_errors(self.output_dir, step):
                folder = finish_draft(self.storage, draft.folder, step, files, {**self._facts, "run": origin})
        finally:
            discard_draft(draft)
        # Only after the new checkpoint is complete: a crash in between must not leave fewer checkpoints than are kept.
        prune(self.output_dir, self._retention, ranked=ranked, newest=folder, run=self.run_id, storage=self.storage)
        return folder


_log = get_logger(__name__)

# Status of a failed save in the sum over processes: more than any number of processes, and exact in float32.
_FAILED = 65536.0


class BackgroundWriter:
    """Writes the checkpoints of a run in a background thread, one at a time."""

    def __init__(self) -> None:
        self._staging = Staging()
        # A process group of its own: collectives of the thread and of the training loop have no common order.
        self._channel = collectives.background_groups()
        self._pending: _WriteThread | None = None
        self._has_waited = False

    def write(self, snapshot: Snapshot, write: Callable[[Snapshot], None]) -> None:
        """Copies the tensors of a snapshot to host memory, and starts to write the checkpoint in the background.

        The previous checkpoint must be complete, see `wait`.

        Args:
            snapshot: the snapshot of the calling process.
            write: a function that writes a snapshot; it is called in the background thread and is collective.
        """
        copy = self._staging.copy(snapshot)
        self._pending = _WriteThread(snapshot.step, functools.partial(self._write, write, copy))

    def _write(self, write: Callable[[Snapshot], None], snapshot: Snapshot) -> None:
        self._staging.wait()
        with collectives.use_groups(self._channel):
            write(snapshot)

    def status(self) -> tuple[Any, float]:
        """Returns the background save, or None, and the state of this process's part of it, a summand of `settle`."""
        return self._pending, 0.0 if self._pending is None else self._pending.status

    def settle(self, save: Any, status_sum: float) -> bool:
        """Ends the background save if all processes have written their parts; returns whether it did.

        Not collective: nothing is sent, and nobody waits.

        Args:
            save: the background save for which the states were summed, see `status`.
            status_sum: the sum of the states of all processes.

        Raises:
            CheckpointError: if the checkpoint could not be written, see `CheckpointWriter.write`.
        """
        # Each process that is done adds 1 or more. On an accelerator, the sum may be one of an earlier save.
        if self._pending is None or save is not self._pending or status_sum < collectives.size():
            return False
        step = self._pending.step
        self.wait_alone()
        if status_sum >= _FAILED:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written by another process",
                code="FG609",
                hint="see the error of that process; earlier checkpoints are untouched",
            )
        return True

    def wait(self) -> bool:
        """Waits until the checkpoint that is being written is complete; returns whether there was one.

        Raises:
            CheckpointError: if the checkpoint could not be written, see `CheckpointWriter.write`.
        """
        thread = self._pending
        if thread is None:
            return False
        if not thread.is_done and not self._has_waited:
            self._has_waited = True
            _log.warning("waiting until the checkpoint of step %d is written", thread.step)
        self.wait_alone()
        return True

    def wait_alone(self) -> None:
        """Waits until the checkpoint that is being written is complete. Not collective.

        Raises:
            CheckpointError: if the checkpoint could not be written.
        """
        # Cleared before an error is raised, so that it is raised only once.
        thread, self._pending = self._pending, None
        if thread is not None:
            thread.finish()


class _WriteThread:
    """A background thread that writes one checkpoint, starting at construction."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        self.step = step
        self._write = write
        self._error: BaseException | None = None
        # A daemon: a process that is stopped at once does not wait for it.
        self._thread = threading.Thread(target=self._run, name="forgather-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - a thread cannot raise to its starter: `finish` raises it
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceNeeded:
    """The sizes and steps of the checkpoints that a run will write, from which the needed disk space follows.

    Args:
        checkpoint: the size of one checkpoint.
        model: the size of the model alone, which is written at the end of the run.
        steps: the steps at which checkpoints will be written.
        present: the steps of existing checkpoints of the same run, in the order in which they were written.

    Units:
        Sizes are in bytes.
    """

    checkpoint: int
    model: int
    steps: Sequence[int]
    present: Sequence[int] = ()

    def num_checkpoints(self, retention: Retention) -> tuple[int, int]:
        """Returns two numbers of checkpoints in addition to the present ones: at the peak, and at the end of the run.

        The peak is the time at which the largest number of checkpoints exist.
        """
        if retention.last is None:  # nothing is removed, so the loop below, slow for many saves, is not needed
            earlier = {*self.present, *self.steps[:-1]}
            return len(earlier) + 1 - len(self.present), len(earlier | {*self.steps[-1:]}) - len(self.present)
        existing = list(self.present)
        most = len(existing)
        for step in self.steps:
            # The new one is written next to all others, even if it replaces one of them: a draft is renamed when it is
            # complete.
            most = max(most, len(existing) + 1)
            existing = [other for other in existing if other != step] + [step]
            gone = set(retention.surplus(existing, self.steps[: retention.best]))
            existing = [other for other in existing if other not in gone]
        return max(most - len(self.present), 1), max(len(existing) - len(self.present), 0)

    def bytes(self, retention: Retention) -> int:
        """Returns the number of bytes of disk space that must be free before the run."""
        most, last = self.num_checkpoints(retention)
        return max(most * self.checkpoint, last * self.checkpoint + self.model)


def refuse_lack_of_space(need: SpaceNeeded, retention: Retention, folder: Path, free: int | None) -> None:
    """Raises an error if the free disk space is smaller than the space that the checkpoints of the run need.

    Args:
        need: the sizes and steps of the checkpoints that the run will write.
        retention: the rules that determine which checkpoints are kept.
        folder: the folder that the message names.
        free: the number of free bytes; None if it is unknown.

    Raises:
        CheckpointError: FG630 if the free space is too small.
    """
    needed = need.bytes(retention)
    if free is None or not need.steps or needed <= free:
        return
    raise CheckpointError(
        f"the run will need {format_bytes(needed)} in {str(folder)!r}, where {format_bytes(free)} are free: "
        f"{_files(need, retention)}",
        code="FG630",
        hint=_space_hint(need, retention, free),
    ).about("args.output_dir")


def _files(need: SpaceNeeded, retention: Retention) -> str:
    """Returns a description of the files that need the most space at one time.

    These are either the checkpoints at the peak, or the checkpoints at the end together with the final model.
    """
    most, last = need.num_checkpoints(retention)
    ends_with_most = need.bytes(retention) > most * need.checkpoint
    count = last if ends_with_most else most
    checkpoints = f"{count} checkpoint{'' if count == 1 else 's'} of {format_bytes(need.checkpoint)}"
    if ends_with_most:
        model = f"the model of {format_bytes(need.model)}"
        return f"{checkpoints}, and {model}" if count else model
    return f"{checkpoints} at one time" if count > 1 else checkpoints


def _space_hint(need: SpaceNeeded, retention: Retention, free: int) -> str:
    limits = range(min(retention.last or len(need.steps), len(need.steps)) - 1, 0, -1)
    # `SpaceNeeded.bytes` walks through all saves: with very many checkpoints only a few limits are tried.
    for last in limits if len(limits) < 100 else (16, 8, 4, 3, 2, 1):
        if need.bytes(dataclasses.replace(retention, last=last, every=None)) <= free:
            without_every = ", without keep_every_n_steps" if retention.every else ""
            return f"save_total_limit: {last} would fit{without_every}; or {_make_room(need, retention, free)}"
    alone = dataclasses.replace(need, checkpoint=need.model)
    if alone.bytes(dataclasses.replace(retention, last=1, every=None)) <= free:
        return f"save_only_model: true with save_total_limit: 1 would fit; or {_make_room(need, retention, free)}"
    return f'{_make_room(need, retention, free)}, or set save_strategy: "no"'


def _make_room(need: SpaceNeeded, retention: Retention, free: int) -> str:
    return f"free {format_bytes(need.bytes(retention) - free)} more, or give another output_dir"


def planned_steps(args: TrainingArguments, state: TrainerState, epoch_ends: Iterator[int] | None) -> list[int]:
    """Returns the optimizer steps at which checkpoints are certain to be written.

    Saves that depend on elapsed time or on a metric are not known in advance and are not included.

    Args:
        args: the training arguments, whose save settings are read.
        state: the trainer state, whose current and last step are read.
        epoch_ends: the number of optimizer steps that are done after each epoch; None if it is unknown.
    """
    first, last = state.global_step + 1, state.max_steps
    if args.save_strategy == "no" or first > last:
        return []
    found: list[int] = []
    if args.save_strategy == "steps":
        every = int(state.save_steps)
        found = list(range(-(-first // every) * every, last + 1, every))
    elif args.save_strategy == "epoch" and epoch_ends is not None:
        found = [step for step in itertools.takewhile(lambda step: step <= last, epoch_ends) if step >= first]
    return found if found[-1:] == [last] else [*found, last]
