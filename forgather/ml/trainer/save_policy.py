"""Determines when a run saves checkpoints (at intervals in minutes, or by a metric), and writes them.

`BestMetric` compares evaluations. `CheckpointSaver` takes snapshots, writes them in the foreground or in the
background, and sends `on_save` to the callbacks for each complete checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forgather.errors import TrainingError, nearest
from forgather.ml.checkpoint.checkpoint_dir import checkpoint_folder, step_of
from forgather.ml.checkpoint.lineage import checkpoints_in_order
from forgather.ml.checkpoint.retention import Retention
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
from forgather.ml.trainer.save_clock import SaveClock
from forgather.ml.trainer.save_function import SaveFunction, Scratch, run_save_function
from forgather.ml.trainer.snapshot import Snapshot, SnapshotBuilder
from forgather.ml.trainer.synchronization import RunSync
from forgather.ml.trainer.weight_average import WeightAverage
from forgather.ml.unsaved_buffers import UnsavedBuffers


class BestMetric:
    """The metric by which the models of different steps are compared.

    Args:
        session: the session, from which the name of the metric and the log history are read.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def is_followed(self) -> bool:
        """True if the training arguments name a metric by which models are compared."""
        return self._session.args.metric_for_best_model is not None

    @property
    def name(self) -> str:
        """The name of the metric in the log history, which begins with `eval_`."""
        name = str(self._session.args.metric_for_best_model)
        return name if name.startswith("eval_") else f"eval_{name}"

    def value_in(self, metrics: dict[str, float]) -> float:
        """Returns the value of the metric in the metrics of an evaluation.

        Raises:
            TrainingError: FG821 if the metrics do not contain it.
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
        """Records the current step as the best one if the value is better than all before; returns whether it is."""
        state = self._session.state
        if self.is_better(value, state.best_metric):
            state.best_metric, state.best_global_step = value, state.global_step
            return True
        return False

    def is_better(self, value: float, than: float | None) -> bool:
        """Returns whether a value is better than the best value so far. NaN is never better.

        Args:
            value: the new value.
            than: the best value so far; None if there is none, and then any number is better.
        """
        # A diverged model must not become the best one only because it was evaluated first.
        if math.isnan(value):
            return False
        return than is None or (value > than if self._session.args.greater_is_better else value < than)

    @property
    def ranking(self) -> list[int]:
        """The evaluated steps, best first. Of steps with equal values, the earlier one comes first."""
        if not self.is_followed:
            return []
        lines = self._session.state.log_history
        found = {int(line["step"]): line[self.name] for line in lines if not math.isnan(line.get(self.name, math.nan))}
        # A negated key instead of `reverse`, which would put the later of equal steps first.
        return sorted(found, key=lambda step: -found[step] if self._session.args.greater_is_better else found[step])

    def is_among_best(self) -> bool:
        """Returns whether the current step is among the `save_top_k` evaluated steps with the best metrics."""
        return self._session.state.global_step in self.ranking[: self._session.args.save_top_k or 1]

    def value_at(self, step: int) -> float | None:
        """Returns the last value of the metric that was measured at a step; None if the step was not evaluated."""
        lines = reversed(self._session.state.log_history)
        return next((line[self.name] for line in lines if line["step"] == step and self.name in line), None)


class CheckpointSaver:
    """Writes the checkpoints of a run.

    Args:
        session: the session, with arguments, trainer state, control flags and callbacks.
        strategy: the strategy, whose weights and optimizer state are saved.
        storage: the object through which checkpoints are written.
        sync: the object that synchronizes control flags between processes.
        training: a function that returns the training state by part: schedule, random states, data position, ...
        origin: the entries about the run that are added to each manifest, see `Manifest`.
        save_function: the user's function that writes further files, see `run_save_function`; or None.
        average: the moving average of the weights, which is saved, too; None if there is none.
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
        average: WeightAverage | None = None,
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
        """The step whose checkpoint was written and is up to date; -1 if there is none."""
        self.stored_step = 0
        """The step of the checkpoint that was written or restored last; 0 if there is none."""
        self._session = session
        self._strategy = strategy
        self._save_function = save_function
        self._origin = origin
        self._sync = sync
        self._training = training
        self._snapshots = SnapshotBuilder(session, strategy, average)
        self._unsaved = UnsavedBuffers(strategy.view)
        self._clock = SaveClock(args.save_minutes if self.enabled else None)
        self._background = BackgroundWriter() if self.enabled and args.async_save else None
        if self._background is not None:
            sync.save_status = self._background.status
        self._state_saved = session.state

    @property
    def best_folder(self) -> Path | None:
        """The folder of the best checkpoint; None if there is none."""
        best = self._session.state.best_model_checkpoint
        return None if best is None else Path(best)

    def description_files(self) -> dict[str, bytes]:
        """Returns the files that describe the model and the tokenizer, see `SnapshotBuilder.description_files`."""
        return self._snapshots.description_files()

    def need(self, epoch_ends: Iterator[int] | None) -> SpaceNeeded | None:
        """Returns the sizes and steps of the checkpoints that the run will write; None if it writes none.

        Collective: every process must call it.

        Args:
            epoch_ends: the number of optimizer steps that are done after each epoch; None if it is unknown.
        """
        steps = planned_steps(self._session.args, self._session.state, epoch_ends)
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

    def refuse_too_little_space(self, epoch_ends: Iterator[int] | None) -> None:
        """Raises an error if the free disk space is too small for the checkpoints that the run will write.

        Collective: every process must call it, before the first step.

        Args:
            epoch_ends: the number of optimizer steps that are done after each epoch; None if it is unknown.

        Raises:
            CheckpointError: FG630, on every process, if the free space is too small.
        """
        need, storage = self.need(epoch_ends), self.writer.storage
        if need is not None:
            retention = retention_of(self._session.args)
            # Without a metric there is no best checkpoint; the estimate would count one that is never kept.
            if not self.best.is_followed:
                retention = dataclasses.replace(retention, best=0)
            free = functools.partial(storage.free_bytes, self.output_dir)
            collectives.run_on_main(lambda: refuse_lack_of_space(need, retention, self.output_dir, free()))

    def begin(self) -> None:
        """Restarts the interval of `save_minutes`, before the first step and after a rewind."""
        self._clock.restart(self._session.state.global_step)

    def is_due(self) -> bool:
        """Returns whether the interval of `save_minutes` has passed. Collective: must be called after every step."""
        return self._clock.is_due(self._session.state.global_step)

    def after_evaluation(self, value: float) -> None:
        """Records the metric of the current step, and requests a checkpoint if the model is among the best ones.

        A checkpoint is requested only if the training arguments turn saving by metric on.

        Args:
            value: the value of the metric.
        """
        args = self._session.args
        self.best.remember(value)
        saves_best = args.save_strategy == "best" or (self.enabled and args.save_on_best)
        if saves_best and self.best.is_among_best():
            self._session.control.should_save = True

    def save(self) -> Path:
        """Writes a checkpoint of the current step, or starts a background save, and returns the checkpoint's folder.

        When the checkpoint is complete, checkpoints that are no longer needed are removed and callbacks get `on_save`.

        Raises:
            CheckpointError: if the checkpoint, or that of the previous background save, could not be written.
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

    def save_into(self, folder: Path) -> Path:
        """Writes a checkpoint of the current step into a folder of its own, and returns that of the checkpoint.

        Collective: every process must call it.

        Args:
            folder: the folder that gets the checkpoint, in place of an earlier one of this run.

        Raises:
            CheckpointError: if the checkpoint could not be written.
        """
        max_steps = self._session.state.max_steps
        storage = self.writer.storage
        own = CheckpointWriter(folder, storage, retention=Retention(last=1), max_steps=max_steps, facts=self._origin)
        own.run_id = self.writer.run_id
        snapshot, scratch = self._snapshot()
        try:
            return own.write(snapshot)
        finally:
            if scratch is not None:
                scratch.remove()

    def _snapshot(self) -> tuple[Snapshot, Scratch | None]:
        """Returns a snapshot of the current step, and the temporary files in it, which the caller removes."""
        if not self._session.args.save_only_model:
            is_stage = self._strategy.layout.pipeline_parallel_size > 1 and self._strategy.topology.dp_rank == 0
            self._unsaved.warn(on_this_rank=is_stage)
        snapshot = self._snapshots.take(self._training)
        if self._save_function is None:
            return snapshot, None
        scratch = run_save_function(self._save_function, self._strategy.model, self._session.state.global_step)
        return dataclasses.replace(snapshot, files=scratch.files), scratch

    def _write(self, folder: Path) -> None:
        state = self._session.state
        # Before the snapshot, which stores the trainer state: the checkpoint itself must say that it is the best one.
        if self._is_best():
            state.best_model_checkpoint = str(folder)
        snapshot, scratch = self._snapshot()
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
        """Writes a checkpoint of the last step if it has none yet, and waits until all checkpoints are complete."""
        if self.enabled and self.stored_step != self._session.state.global_step:
            self.save()
        self.report_finished(wait=True)

    def report_finished(self, *, wait: bool) -> None:
        """Sends `on_save` if a background save was completed. Every process must call it after the same steps.

        The processes learn from the sums of a training step whether the save is complete on all of them, so that a save
        costs no collective of its own while it runs.

        Args:
            wait: whether to wait until the background save is complete.

        Raises:
            CheckpointError: if the checkpoint could not be written.
        """
        background = self._background
        if background is None:
            return
        known = self._sync.saves if self._sync.several else background.status()
        if background.wait() if wait else background.settle(*known):
            self._send_on_save(self._state_saved)

    def wait_after_failure(self, *, alone: bool) -> None:
        """Waits for the background save of a run that has failed.

        Args:
            alone: whether this process stops alone, so that it cannot take part in a collective.

        Raises:
            CheckpointError: if the checkpoint could not be written.
        """
        if self._background is not None and alone:
            self._background.wait_alone()
        self.report_finished(wait=True)

    def _send_on_save(self, state: Any) -> None:
        self._session.send("on_save", state=state)
        # A callback may stop the run in `on_save`; all processes must then stop at the same step.
        self._sync.control(self._session.control, self._session.dispatcher)

    def _is_best(self) -> bool:
        """Returns whether the model of the current step is better than the best model that was saved."""
        # `state.best_metric` may belong to an evaluation without a checkpoint, so saved models are compared.
        value, best = self.best.value_at(self._session.state.global_step), self.best_folder
        if value is None:
            return False
        return self.best.is_better(value, None if best is None else self.best.value_at(step_of(best)))

    def _ranking(self) -> list[int]:
        """Returns the evaluated steps, best first.

        The step of the best checkpoint always comes first, even if the log history does not contain its evaluation.
        """
        best = [] if self.best_folder is None else [step_of(self.best_folder)]
        return best + [step for step in self.best.ranking if step not in best]
