"""When a run saves checkpoints: by steps, minutes or metrics; and the saves of a run.

`SaveClock` tells when the interval in minutes has passed, with the same answer on every process. `BestMetric` compares
evaluations. `CheckpointSaver` takes snapshots, writes them in the foreground or in the background, and reports each
complete checkpoint to the callbacks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forgather.errors import TrainingError, nearest
from forgather.ml.checkpoint.checkpoint_dir import checkpoint_folder, step_of
from forgather.ml.checkpoint.lineage import checkpoints_in_order
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed import collectives, phase
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.checkpoint_writer import (
    BackgroundWriter,
    CheckpointWriter,
    SpaceNeeded,
    planned_steps,
    refuse_lack_of_space,
    retention_of,
)
from forgather.ml.trainer.control import Session
from forgather.ml.trainer.save_function import SaveFunction, Scratch, run_save_function
from forgather.ml.trainer.snapshot import Snapshot, SnapshotBuilder
from forgather.ml.trainer.synchronization import RunSync


class SaveClock:
    """Tells when a checkpoint by minutes is due.

    Only the main process reads the clock. It is asked at steps that all processes agree on, more often as the time
    comes closer, so that other steps need no communication.

    Args:
        minutes: between two checkpoints; None for no such interval.
        now: returns seconds.
    """

    def __init__(self, minutes: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = None if minutes is None else 60.0 * minutes
        self._now = now
        self._since = now()
        self._from_step = self._ask_at = 0

    def restart(self, step: int) -> None:
        """Restarts the interval: the run begins, a checkpoint was written, or the run went back to one.

        Args:
            step: the current step.
        """
        self._since = self._now()
        self._from_step, self._ask_at = step, step + 1

    def is_due(self, step: int) -> bool:
        """Returns whether the interval has passed. Collective: every process asks after every step."""
        if self._seconds is None or step < self._ask_at:
            return False
        # One clock for all: with a clock of its own, a process could begin a collective save alone.
        passed = collectives.run_on_main(lambda: self._now() - self._since)
        if passed >= self._seconds:
            return True
        if collectives.is_multi_process():
            # Half of the remaining time at the current pace: if steps become slower, the next question still comes in
            # time.
            pace = passed / (step - self._from_step)
            self._ask_at = step + max(1, int((self._seconds - passed) / max(pace, 1e-6) / 2))
        return False


class BestMetric:
    """The metric by which models are compared.

    Args:
        session: gives the name of the metric, and the log history.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def is_followed(self) -> bool:
        """True if models are compared at all."""
        return self._session.args.metric_for_best_model is not None

    @property
    def name(self) -> str:
        """The metric's name in the log history."""
        name = str(self._session.args.metric_for_best_model)
        return name if name.startswith("eval_") else f"eval_{name}"

    def value_in(self, metrics: dict[str, float]) -> float:
        """Returns the metric from those of an evaluation.

        Raises:
            TrainingError: FG821 if it is not among them.
        """
        if self.name not in metrics:
            raise TrainingError(
                f"metric_for_best_model is {self._session.args.metric_for_best_model!r}, and the evaluation gave no "
                f"{self.name!r}",
                code="FG821",
                hint=nearest(self.name, sorted(metrics)),
            )
        return metrics[self.name]

    def remember(self, value: float) -> bool:
        """Records the model of the current step as the best one if it is; returns whether it is."""
        state = self._session.state
        if self.is_better(value, state.best_metric):
            state.best_metric, state.best_global_step = value, state.global_step
            return True
        return False

    def is_better(self, value: float, than: float | None) -> bool:
        """Returns whether one value is better than another; any number is better than none, and NaN is never better.

        Args:
            value: to compare.
            than: the best value so far; None for none.
        """
        # A diverged model must not become the best one only because it was evaluated first.
        if math.isnan(value):
            return False
        return than is None or (value > than if self._session.args.greater_is_better else value < than)

    @property
    def ranking(self) -> list[int]:
        """The evaluated steps, best first; of equal values, the earlier step first."""
        if not self.is_followed:
            return []
        lines = self._session.state.log_history
        found = {int(line["step"]): line[self.name] for line in lines if not math.isnan(line.get(self.name, math.nan))}
        # A negated key instead of `reverse`, which would put the later of equal steps first.
        return sorted(found, key=lambda step: -found[step] if self._session.args.greater_is_better else found[step])

    def is_among_best(self) -> bool:
        """Returns whether the model of the current step is among the best `save_top_k`."""
        return self._session.state.global_step in self.ranking[: self._session.args.save_top_k or 1]

    def value_at(self, step: int) -> float | None:
        """Returns the value that was last measured at a step; None if there is none."""
        lines = reversed(self._session.state.log_history)
        return next((line[self.name] for line in lines if line["step"] == step and self.name in line), None)


class CheckpointSaver:
    """Writes the checkpoints of a run.

    Args:
        session: arguments, state, control, callbacks.
        strategy: holds weights and optimizer.
        storage: writes checkpoints.
        sync: synchronizes control flags between processes.
        training: returns schedule, random states and position in the data.
        origin: entries about the run in each manifest, see `Manifest`.
        save_function: see `run_save_function`; None for none.
    """

    def __init__(
        self,
        session: Session,
        strategy: Strategy,
        storage: Storage,
        sync: RunSync,
        training: Callable[[], Mapping[str, Any]],
        *,
        origin: Mapping[str, Any],
        save_function: SaveFunction | None = None,
    ) -> None:
        args = session.args
        self.enabled = args.save_strategy != "no"
        self.output_dir = Path(args.output_dir)
        self.best = BestMetric(session)
        self.writer = CheckpointWriter(
            self.output_dir,
            storage,
            retention=retention_of(args),
            max_steps=session.state.max_steps,
            facts=origin,
        )
        self.written_step = -1
        """The step whose checkpoint on disk is complete and up to date; -1 for none."""
        self.stored_step = 0
        """The step whose weights are stored in a checkpoint."""
        self._session = session
        self._strategy = strategy
        self._save_function = save_function
        self._sync = sync
        self._training = training
        self._snapshots = SnapshotBuilder(session, strategy)
        self._clock = SaveClock(args.save_minutes if self.enabled else None)
        self._background = BackgroundWriter() if self.enabled and args.async_save else None
        self._state_saved = session.state

    @property
    def best_folder(self) -> Path | None:
        """Folder of the best checkpoint; None if there is none."""
        best = self._session.state.best_model_checkpoint
        return None if best is None else Path(best)

    def description_files(self) -> dict[str, bytes]:
        """Returns the files that describe model and tokenizer, see `SnapshotBuilder.description_files`."""
        return self._snapshots.description_files()

    def need(self, updates_per_epoch: int | None) -> SpaceNeeded | None:
        """Returns the bytes and steps that the run will write; None if it writes nothing. Collective.

        Args:
            updates_per_epoch: optimizer steps per epoch; None if unknown.
        """
        steps = planned_steps(self._session.args, self._session.state, updates_per_epoch)
        if not steps:
            return None
        # Sizes of a real snapshot: types, tied weights and sharding are those of the files that will be written.
        parts = collectives.all_gather((*self._snapshots.sizes(self._training), self._snapshots.optimizer_size()))
        run_id = self.writer.run_id
        # By name: of a sharded parameter, several processes report the size of the whole.
        later = {name: size for *_, by_name in parts for name, size in by_name.items()}
        return SpaceNeeded(
            checkpoint=sum(whole for whole, *_ in parts) + sum(later.values()),
            model=sum(model for _, model, _ in parts),
            steps=steps,
            present=[
                step_of(folder) for folder, origin in checkpoints_in_order(self.output_dir) if origin.run == run_id
            ],
        )

    def refuse_too_little_space(self, updates_per_epoch: int | None) -> None:
        """Checks before the first step that the disk has room for what the run will write. Collective.

        Args:
            updates_per_epoch: optimizer steps per epoch; None if unknown.

        Raises:
            CheckpointError: FG630.
        """
        need, storage = self.need(updates_per_epoch), self.writer.storage
        if need is not None:
            retention = retention_of(self._session.args)
            # Without a metric there is no best checkpoint; the estimate would count one that is never kept.
            if not self.best.is_followed:
                retention = dataclasses.replace(retention, best=0)
            free = functools.partial(storage.free_bytes, self.output_dir)
            collectives.run_on_main(lambda: refuse_lack_of_space(need, retention, self.output_dir, free()))

    def begin(self) -> None:
        """Starts the interval in minutes: the next step is the first one, or the first one after a rewind."""
        self._clock.restart(self._session.state.global_step)

    def is_due(self) -> bool:
        """Returns, after each step, whether the interval in minutes has passed."""
        return self._clock.is_due(self._session.state.global_step)

    def after_evaluation(self, value: float) -> None:
        """Records the metric of the current step, and requests a checkpoint if the model is among the best."""
        args = self._session.args
        self.best.remember(value)
        saves_best = args.save_strategy == "best" or (self.enabled and args.save_on_best)
        if saves_best and self.best.is_among_best():
            self._session.control.should_save = True

    def save(self) -> Path:
        """Writes a checkpoint of the current step, or starts to in the background, and returns its folder.

        When it is complete, surplus checkpoints are removed and callbacks get `on_save`.

        Raises:
            CheckpointError: it, or the previous background save, could not be written.
        """
        state = self._session.state
        folder = checkpoint_folder(self.output_dir, state.global_step)
        if self.written_step != state.global_step:
            phase.set_phase("saving", state.global_step)
            # One background save at a time: both would use the same host buffers and process group.
            self.report_finished(wait=True)
            self._write(folder)
            self.written_step = self.stored_step = state.global_step
            self._clock.restart(state.global_step)
        self._session.control.should_save = False  # not earlier: the snapshot stores it as a pending action
        if self._background is None:
            self._send_on_save(state)
        return folder

    def _write(self, folder: Path) -> None:
        state = self._session.state
        # Before the snapshot, which stores the trainer state: the checkpoint itself must say that it is the best one.
        if self._is_best():
            state.best_model_checkpoint = str(folder)
        snapshot = self._snapshots.take(self._training)
        scratch: Scratch | None = None
        if self._save_function is not None:
            scratch = run_save_function(self._save_function, self._strategy.model, state.global_step)
            snapshot = dataclasses.replace(snapshot, files=scratch.files)
        write = functools.partial(self._write_and_remove, ranked=self._ranking(), scratch=scratch)
        if self._background is None:
            write(snapshot)
            return
        try:
            self._background.write(snapshot, write)
        except BaseException:
            # No thread was started that would remove the files.
            if scratch is not None:
                scratch.remove()
            raise
        # Callbacks get this state when the background save is complete; the run changes its own until then.
        self._state_saved = dataclasses.replace(state, log_history=[*state.log_history])

    def _write_and_remove(self, snapshot: Snapshot, ranked: Sequence[int], scratch: Scratch | None) -> None:
        try:
            self.writer.write(snapshot, ranked=ranked)
        finally:
            if scratch is not None:
                scratch.remove()

    def end(self) -> None:
        """Writes a checkpoint of the end of the run, if steps followed the last one, and waits for it."""
        if self.enabled and self.stored_step != self._session.state.global_step:
            self.save()
        self.report_finished(wait=True)

    def report_finished(self, *, wait: bool) -> None:
        """Sends `on_save` for a background save once it is complete. Collective.

        Args:
            wait: wait until it is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._background is not None and self._background.is_finished(wait=wait):
            self._send_on_save(self._state_saved)

    def wait_after_failure(self, *, alone: bool) -> None:
        """Waits for the background save of a run that has failed.

        Args:
            alone: other processes may be elsewhere in the program, so no collective is possible.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._background is not None and alone:
            self._background.wait_alone()
        self.report_finished(wait=True)

    def _send_on_save(self, state: Any) -> None:
        self._session.send("on_save", state=state)
        # A callback may stop the run in `on_save`; all processes must then stop at the same step.
        self._sync.control(self._session.control, self._session.dispatcher.callbacks)

    def _is_best(self) -> bool:
        """Returns whether the model of the current step is better than the best saved one."""
        # `state.best_metric` may belong to an evaluation without a checkpoint, so saved models are compared.
        value, best = self.best.value_at(self._session.state.global_step), self.best_folder
        if value is None:
            return False
        return self.best.is_better(value, None if best is None else self.best.value_at(step_of(best)))

    def _ranking(self) -> list[int]:
        """Returns the evaluated steps, best first; the best checkpoint is first even without a log line."""
        best = [] if self.best_folder is None else [step_of(self.best_folder)]
        return best + [step for step in self.best.ranking if step not in best]
