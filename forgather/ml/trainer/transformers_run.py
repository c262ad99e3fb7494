"""`TransformersRun`: what the trainers that drive `transformers.Trainer`, or a subclass of it, have in common.

The input is the training arguments of transformers, factories of optimizer and schedule, and callbacks. A run starts,
is interrupted, resumes and ends as with the trainers of Forgather; the steps and the files of checkpoints are those of
transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from forgather.errors import CheckpointError
from forgather.interrupt import SAME_OF_SEVERAL_SECONDS, SAME_SECONDS, Interrupt, signal_handler
from forgather.ml.batch_dependence import warn_of_micro_batches
from forgather.ml.callbacks.output_target import run_folder
from forgather.ml.callbacks.speed import SpeedCallback
from forgather.ml.callbacks.trackers import tracker_callbacks
from forgather.ml.checkpoint.files import TRAINER_STATE
from forgather.ml.data.row_epoch import TrainingRows
from forgather.ml.distributed import collectives
from forgather.ml.distributed.env import device_for_deepspeed_imports
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.log import get_logger
from forgather.ml.low_bit_optim import refuse_copies
from forgather.ml.run_dir import own_run_folder
from forgather.ml.strategy.ddp_buckets import fixed_buckets, note_unused_weights
from forgather.ml.tracking import Logged, receiving
from forgather.ml.trainer.optimizers import make_optimizer, make_schedule
from forgather.ml.trainer.run_start import RunStart
from forgather.ml.trainer.stream_choice import is_iterable
from forgather.ml.unsaved_buffers import UnsavedBuffers

_log = get_logger(__name__)


class TransformersRun(Trainer):
    """A `transformers.Trainer` that starts, stops, resumes and reports as the trainers of Forgather do.

    A subclass calls `_prepare_run` before the constructor of transformers, and `_finish_preparation` after it.
    """

    def _prepare_run(
        self,
        args: TrainingArguments,
        optimizer_factory: Callable[..., Optimizer] | None,
        lr_scheduler_factory: Callable[..., Any] | None,
        callbacks: Sequence[TrainerCallback],
    ) -> list[TrainerCallback]:
        """Keeps what the run needs, and returns the callbacks for the constructor of transformers."""
        if getattr(args, "logging_dir", None) is None:  # callbacks write there; transformers has no such setting now
            args.logging_dir = str(own_run_folder(str(args.output_dir)))  # type: ignore[attr-defined]
        if not torch.accelerator.is_available():
            args.dataloader_pin_memory = False  # without an accelerator the loader would warn about it
        # Before the model is built: it keeps what the launcher requested, which `begin` compares in `train`.
        self._start = RunStart()
        self._optimizer_factory = optimizer_factory
        self._scheduler_factory = lr_scheduler_factory
        self._num_rows = 0
        self._unsaved: UnsavedBuffers | None = None
        speed = SpeedCallback(rows=lambda: self._num_rows * self.args.world_size)
        self._report_to = args.report_to
        trackers = tracker_callbacks(args.report_to, callbacks)
        # transformers would add its own callbacks for the same trackers.
        args.report_to = []
        # The speeds are added to the log line before any other callback gets it.
        return [speed, *trackers, *callbacks] if callbacks or trackers else []

    def _finish_preparation(self, callbacks: Sequence[TrainerCallback]) -> None:
        """Removes the progress bar and the printer of transformers if other callbacks are given."""
        self.args.report_to = self._report_to
        if callbacks:
            self.remove_callback(PrinterCallback)
            self.remove_callback(ProgressCallback)

    def _seed_run(self) -> None:
        """Seeds the generators at the start of training.

        transformers seeds in its constructor and draws the order of the rows here. Seeding again makes the order
        independent of numbers that were drawn in between.
        """
        set_seed(self.args.seed)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns the loader of transformers, whose workers read rows in the epoch of the training.

        transformers and Accelerate set the epoch of the data set in the main process alone, not in each one of several,
        not after a resume within an epoch, and an evaluation of the same data set changes it.
        """
        given = self.train_dataset
        # A row of `datasets` is the same in each epoch, and transformers finds its unused columns by its class.
        if given is None or is_iterable(given) or isinstance(given, datasets.Dataset):
            return super().get_train_dataloader()
        self.train_dataset = TrainingRows(given)
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset = given

    def train(self, resume_from_checkpoint: bool | str | None = None, *others: Any, **named: Any) -> Any:
        """Trains to the end of the run, and returns the result of `transformers.Trainer.train`.

        Args:
            resume_from_checkpoint: the checkpoint to resume from: true or "auto" for the newest one in `output_dir`, or
                a folder. By default it is the value in the training arguments, which `transformers.Trainer` ignores.
            *others: the further positional arguments of `transformers.Trainer.train`.
            **named: the keyword arguments of `transformers.Trainer.train`.

        Raises:
            CheckpointError: FG601 if the folder does not exist.
            DistributedError: FG776 if there is a single process and the config requests several.
            KeyboardInterrupt: on all processes, after Ctrl-C, SIGTERM or SIGUSR1. A checkpoint is saved first if saving
                is on.
        """
        model = cast(nn.Module, self.model)
        self._start.begin(self.args.world_size, self.args.device, model=model)
        accumulation = self.args.gradient_accumulation_steps
        warn_of_micro_batches(model, replicas=self.args.world_size, accumulation=accumulation)
        self._unsaved = UnsavedBuffers(model)
        self._seed_run()
        request = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        folder = _resume_folder(request, str(self.args.output_dir))
        if folder is not None:
            _log.warning("resuming from %s", folder)
        several = self.args.world_size > 1
        same = SAME_OF_SEVERAL_SECONDS if several else SAME_SECONDS
        with signal_handler(same_within=same, speaks=self.args.process_index == 0) as interrupt:
            stop = _StopAfterStep(interrupt, saves=self.args.save_strategy != "no")
            epoch = _EpochOfRows()
            self.add_callback(stop)
            self.add_callback(epoch)
            try:
                with device_for_deepspeed_imports(), fixed_buckets(), self._receiving():
                    result = super().train(folder, *others, **named)
            except BaseException as error:
                note_unused_weights(error, self.model_wrapped)
                if stop.began:
                    self._close(error)
                raise
            finally:
                self.remove_callback(stop)
                self.remove_callback(epoch)
        if (asked := stop.asked()) is not None:
            raise asked
        return result

    def _receiving(self) -> AbstractContextManager[None]:
        """Returns a context manager in which the user's code can log to the callbacks, see `forgather.ml.tracking`."""

        def send(logged: Logged) -> None:
            for callback in self.callback_handler.callbacks:
                # The handler of transformers sends the events of transformers alone.
                if (handler := getattr(callback, "on_logged", None)) is not None:
                    handler(self.args, self.state, self.control, logged=logged, model=self.model)

        is_main = self.args.process_index == 0
        return receiving(lambda: self.state.global_step, run_folder(self.args), send if is_main else None)

    def _close(self, error: BaseException) -> None:
        """Sends `on_train_end` after training has failed, so that callbacks can close files and trackers."""
        try:
            self.callback_handler.call_event("on_train_end", self.args, self.state, self.control, error=error)  # type: ignore[no-untyped-call]
        except Exception as failure:  # noqa: BLE001 - callback border: the first error is the one to show
            error.add_note(f"on_train_end failed too: {failure!r}")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._unsaved is not None and not self.args.save_only_model:
            self._unsaved.warn()
        with without_progress_bars():
            super()._save(output_dir, state_dict)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Returns the optimizer that the `optimizer_factory` makes; without a factory, the one of transformers."""
        if self.optimizer is None and self._optimizer_factory is not None:
            trained = cast(nn.Module, self.model if model is None else model)
            self.optimizer = make_optimizer(trained, self.args, self._optimizer_factory)
            if self.args.world_size > 1 and not self.is_fsdp_enabled:
                refuse_copies(self.optimizer, "transformers' Trainer", self.args.world_size)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Returns the learning rate schedule that the factory makes; without a factory, the one of transformers.

        Args:
            num_training_steps: the number of optimizer steps of the whole run.
            optimizer: the optimizer whose learning rate is scheduled; the trainer's optimizer by default.
        """
        if self.lr_scheduler is None and self._scheduler_factory is not None:
            scheduled = cast(Optimizer, self.optimizer if optimizer is None else optimizer)
            self.lr_scheduler = make_schedule(scheduled, self.args, num_training_steps, self._scheduler_factory)
        return super().create_scheduler(num_training_steps, optimizer)


def _resume_folder(request: bool | str | None, output_dir: str) -> str | None:
    if request is None or request is False:
        return None
    if request is True or request == "auto":
        return _newest_whole_checkpoint(Path(output_dir))
    folder = os.path.expanduser(request)
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"there is no checkpoint folder {folder!r}",
            code="FG601",
            hint="give a folder named checkpoint-<step>, or resume_from_checkpoint: auto",
        )
    return folder


def _newest_whole_checkpoint(output_dir: Path) -> str | None:
    """Returns the newest checkpoint whose state file, which transformers writes last, can be read; None without one."""
    folders = {folder: folder.name.removeprefix("checkpoint-") for folder in output_dir.glob("checkpoint-*")}
    for folder in sorted((f for f, step in folders.items() if step.isdigit()), key=lambda f: -int(folders[f])):
        try:
            json.loads((folder / TRAINER_STATE).read_text())
        except (OSError, ValueError):
            _log.warning("skipped %s: it is not complete", folder)
        else:
            return str(folder)
    return None


class _EpochOfRows(TrainerCallback):
    """A callback that sets the epoch in which training rows are read."""

    def __init__(self) -> None:
        self._epoch: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Begins to count: transformers starts the training again when it looks for a batch size."""
        self._epoch = None

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **others: Any,
    ) -> None:
        """Sets the epoch before the loader reads its first rows."""
        # Counted: `state.epoch` is still within an epoch that a callback ended early.
        self._epoch = int(state.epoch or 0) if self._epoch is None else self._epoch + 1
        if isinstance(rows := train_dataloader.dataset, TrainingRows):
            rows.begin_epoch(self._epoch)


class _StopAfterStep(TrainerCallback):
    """A callback that ends the run after the step in which a process got a signal, and saves if saving is on."""

    def __init__(self, interrupt: Interrupt, *, saves: bool) -> None:
        self.began = False
        self._asked: KeyboardInterrupt | None = None
        self._interrupt = interrupt
        self._saves = saves

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Records that callbacks got `on_train_begin` and must get `on_train_end`."""
        self.began = True

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Records that a step has begun: from now on, an interrupted run has a state to save."""
        self._interrupt.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> TrainerControl:
        """If a process was asked to stop, requests the end of training, and a checkpoint if saving is enabled."""
        if self.asked() is not None:
            control.should_training_stop = True
            control.should_save = control.should_save or self._saves
        return control

    def asked(self) -> KeyboardInterrupt | None:
        """Returns the error to raise if a process was asked to stop, otherwise None.

        Collective: every process must call it after the same training steps.
        """
        self._asked = self._asked or self._interrupt.error_for(collectives.all_sum(self._interrupt.stop_code))
        return self._asked
