"""The state of one call of `train()`, and the work around each optimizer step, from reading data to saving.

The training loop calls the methods of `Run` (begin, finish, log, evaluate, save). After `finish_step` the run is at a
step boundary, at which a checkpoint can store the whole state of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from forgather.errors import TrainingError
from forgather.interrupt import Interrupt
from forgather.ml.checkpoint.checkpoint_dir import checkpoint_folder
from forgather.ml.checkpoint.files import is_of_transformers
from forgather.ml.checkpoint.lineage import origin_of
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.checkpoint.rng import capture_rng, gathered_rng, restore_rng, seed_process
from forgather.ml.checkpoint.storage import Storage
from forgather.ml.distributed import collectives, phase
from forgather.ml.distributed.exposed_communication import ExposedCommunication
from forgather.ml.log import get_logger
from forgather.ml.strategy.base import Strategy
from forgather.ml.task import task_of
from forgather.ml.trainer import resume
from forgather.ml.trainer.checkpoint_parts import restoring
from forgather.ml.trainer.control import (
    Session,
    after_epoch,
    after_step,
    begin_step,
    is_evaluated,
    pending_actions,
    restore_pending,
)
from forgather.ml.trainer.control_requests import ControlRequests
from forgather.ml.trainer.data_loader import TrainBatches
from forgather.ml.trainer.device_copies import copied_ahead
from forgather.ml.trainer.freezing import Freezing
from forgather.ml.trainer.meter import Meter
from forgather.ml.trainer.parameter_groups import base_group, rates_by_name
from forgather.ml.trainer.rate_scale import ScaledSchedule
from forgather.ml.trainer.recompilation import Recompilations
from forgather.ml.trainer.resume import RestoredState, restore_checkpoint
from forgather.ml.trainer.resume_checks import Meanings, meaning_facts
from forgather.ml.trainer.rewind import Renewable, RewindTarget, SkipList
from forgather.ml.trainer.save_function import SaveFunction
from forgather.ml.trainer.save_policy import CheckpointSaver
from forgather.ml.trainer.snapshot import import_states, origin_facts
from forgather.ml.trainer.step_clock import StepClock
from forgather.ml.trainer.step_guard import BadSteps, choose_guard
from forgather.ml.trainer.synchronization import RunSync
from forgather.ml.trainer.transformers_resume import restore_transformers
from forgather.ml.trainer.utilization import Utilization
from forgather.ml.trainer.weight_average import WeightAverage
from forgather.ml.types import StepRecord, Update, Window

_log = get_logger(__name__)


class Run:
    """The state of one call of `train()`.

    Args:
        session: the session, with arguments, trainer state, control flags and callbacks.
        strategy: the strategy, whose optimizer must already be built.
        data: the training data as windows (the micro-batches of one optimizer step), with the current position.
        schedule: the learning rate schedule.
        evaluate: a function that evaluates the model and returns the metrics; None if there is no evaluation data. The
            function takes a callable, which it calls before each batch. If the callable returns true, the function
            stops and returns None.
        interrupt: the record of whether this process was asked to stop.
        storage: the object through which checkpoints are written.
        save_function: the user's function that writes further files of a checkpoint, or None.
        freezing: the parameters that are frozen in some of the steps; None if there are none.
        average: the moving average of the weights; None if there is none.
    """

    def __init__(
        self,
        session: Session,
        strategy: Strategy,
        data: TrainBatches,
        schedule: Any,
        *,
        evaluate: Callable[[Callable[[], bool]], dict[str, float] | None] | None,
        interrupt: Interrupt,
        storage: Storage,
        save_function: SaveFunction | None = None,
        freezing: Freezing | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        self.session = session
        self.args = session.args
        self.strategy = strategy
        self.data = data
        self.schedule = schedule
        self.sync = RunSync(strategy, interrupt)
        self._scaled = ScaledSchedule(schedule, strategy.optimizer)
        self.requests = ControlRequests(session, self.sync, self._scaled, is_main=strategy.topology.rank == 0)
        self.stops_together = False
        self.complete = False
        self._counts_tokens = task_of(strategy.model, strategy.rule).counts_tokens
        self.meter = Meter(strategy.topology.device, counts_tokens=self._counts_tokens)
        self.utilization = Utilization(str(self.args.logging_dir))
        self.recompilations = Recompilations(enabled=self.args.torch_compile)
        self.communication = ExposedCommunication(
            self.args.communication_share, strategy.topology.device, several=self.sync.several
        )
        self.clock = StepClock(lambda: bool(session.dispatcher.listeners("on_step_record")), self._send_record)
        self.guard = choose_guard(
            self.args,
            strategy.optimizer,
            strategy.topology.device,
            skips_on_device=strategy.skips_on_device,
            rank=strategy.topology.rank,
        )
        self.skips = SkipList(most=self.args.max_bad_steps, among=self.args.spike_window)
        origin = origin_facts(strategy, session.args, data.fingerprint)
        parts = (session, strategy, storage, self.sync, self._training_state)
        self.saver = CheckpointSaver(*parts, origin=origin, save_function=save_function, average=average)
        self._average = average
        self.in_update = False
        self._freezing = freezing or Freezing(None)
        self._meanings = meaning_facts(session.dispatcher.scene.get("processing_class"), data.loader.dataset)
        self._evaluate = evaluate
        self._cut_short = False
        self._windows = Renewable(self._read)
        self._rewind_target = RewindTarget(self.saver.output_dir, storage)
        self._rng: dict[str, Any] | None = None
        self._pending: list[str] = []
        self._follows_metric = isinstance(schedule, ReduceLROnPlateau)
        self._has_groups = bool(self.args.parameter_groups) or self.args.layer_lr_decay is not None
        self._rates: dict[str, float] = {}
        self._num_batches = data.num_batches or data.accumulation.num_micro_batches(session.state.max_steps)
        # `BadSteps` checks the norm of every step; `FiniteGuard` checks it only if a log line or clipping needs it.
        is_read = self.args.logging_strategy != "no" or isinstance(self.guard, BadSteps)
        self.want_norm = is_read and not self.args.optimizer_in_backward

    @property
    def may_save(self) -> bool:
        """True if an interrupted run may still write a checkpoint.

        This is true if all processes have agreed to stop at the same step boundary. With a single process it is also
        true as long as no immediate stop was requested.
        """
        # A checkpoint is written collectively: a process that stops alone cannot write one.
        return self.stops_together or not (self.sync.several or self.sync.interrupt.at_once)

    @property
    def finished(self) -> bool:
        """True if no further optimizer step is due."""
        state = self.session.state
        # Steps that were lost because a callback cut an epoch short are not added as further epochs.
        if self._cut_short and self.data.epoch >= state.num_train_epochs:
            return True
        return self.session.control.should_training_stop or state.global_step >= state.max_steps

    @property
    def step_ends_epoch(self) -> bool:
        """True if a callback requested the end of the epoch, or of the run."""
        return self.session.control.should_epoch_stop or self.session.control.should_training_stop

    def end_resumed_step(self) -> None:
        """Finishes the step at which the restored checkpoint was written.

        An interrupted evaluation is repeated. If the step was the last one of an epoch, the epoch is finished.
        """
        self._do_pending_actions()
        is_whole = self.data.at_end_of_epoch
        # The second case: the run ended within an epoch, and its last checkpoint was written before the epoch's end.
        if is_whole or (self.finished and self.data.batch and not is_evaluated(self.session.state)):
            self._restore_rng()
            self.finish_epoch(complete=is_whole)

    def _do_pending_actions(self) -> None:
        if self._pending:
            restore_pending(self.session.control, self._pending)
            if self._rng is not None:
                restore_rng(self._rng)
            self._evaluate_save()
            self._rng = self._rng and capture_rng()
            self.stop_if_asked()

    def begin_epoch(self) -> Iterator[Window]:
        """Sends `on_epoch_begin`, and returns the windows of the epoch, starting at the current position.

        A window is the micro-batches of one optimizer step.
        """
        # A checkpoint at the end of an epoch precedes this event, one within an epoch follows it: random numbers that
        # callbacks draw here belong to the run only in the first case.
        if self.data.batch == 0:
            self._restore_rng()
        self.session.control.should_epoch_stop = False
        self.session.send("on_epoch_begin")
        return iter(self._windows)

    def _read(self) -> Iterator[Window]:
        self._set_phase("reading data")
        step = self.session.state.global_step
        windows = self.clock.reading(self.data.windows(self.strategy.rule, step=step, padded=True))
        self._restore_rng()
        has_length = self.data.num_batches is not None
        if self.data.has_streams:
            return self.data.same_everywhere(self.sync.stream_windows(windows, self.data))
        agreed = self.sync.windows(windows, has_length=has_length)
        if self.data.copies_ahead:
            return copied_ahead(agreed, self.strategy.topology.device)
        return agreed if has_length else self.data.same_everywhere(agreed)

    def _restore_rng(self) -> None:
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def begin_step(self) -> None:
        """Clears the control flags and sends `on_step_begin`. From now on, an interrupted run has a state to save."""
        self.sync.interrupt.begin()
        self._set_phase("forward and backward")
        self.guard.bad = self.guard.fault = None
        self._freezing.apply(self.strategy, self.session.state.global_step, self.data.epoch)
        begin_step(self.session.control)
        self.session.send("on_step_begin")
        if self.communication.is_measured:
            self.clock.enter(None)
            with self.meter.paused():
                self.communication.begin_step()
        self.clock.enter("forward_backward")

    def _set_phase(self, activity: str) -> None:
        """Records the current activity and step, which error messages and stack dumps report."""
        phase.set_phase(activity, self.session.state.global_step + 1)

    def after_micro_batch(self) -> None:
        """Sends `on_substep_end`, after each micro-batch except the last one of the optimizer step."""
        self.session.send("on_substep_end")

    def check_loss(self, share: Tensor) -> float | Tensor:
        """Returns the loss of the current step, summed over all processes, after the step guard has checked it.

        Args:
            share: the part of the loss that this process computed.

        Shapes:
            share: a scalar tensor. Returns a float, or a scalar tensor if reading it would wait for the device.

        Raises:
            TrainingError: FG818 if the loss is not finite and the run must end.
        """
        self.clock.enter("sync")
        return self.guard.loss(self.sync.step(share)[0], self.session.state.global_step + 1)

    def check_step(self, share: Tensor) -> tuple[float | Tensor, Tensor | None]:
        """Returns what `check_loss` does, and the squared gradient norm; reads the next window of rows ahead.

        The squared norm is None if the strategy measures the norm in its update.

        Args:
            share: the part of the loss that this process computed.

        Shapes:
            share: a scalar tensor. The loss is as in `check_loss`; the squared norm is a scalar tensor.

        Raises:
            TrainingError: FG818 if the loss is not finite and the run must end.
        """
        self.clock.enter("sync")
        has_norm = self.sync.several and (self.args.max_grad_norm > 0 or self.want_norm)
        squares = self.strategy.share_of_squares() if has_norm else None
        loss, squares = self.sync.step(share, squares, looks_ahead=self._looks_ahead)
        return self.guard.loss(loss, self.session.state.global_step + 1), squares

    @property
    def _looks_ahead(self) -> bool:
        # A callback of the user may change what is read next, or end the run or the epoch before it is read.
        state = self.session.state
        is_last = state.global_step + 1 >= state.max_steps
        return self.data.may_be_read_early and not is_last and not self.session.dispatcher.has_foreign

    def _send_record(self, record: StepRecord) -> None:
        self.session.send("on_step_record", record=record, report=self.session.report)

    def report_bad_step(self) -> None:
        """Sends the record of the step that ends the run, or after which it goes back, if that is why."""
        self.clock.flush(wait=True)
        if self.guard.fault is not None:
            step, what = self.guard.fault
            self.guard.fault = None
            self._send_record(StepRecord(step=step, loss=None, bad=what))

    def before_update(self, norm: Tensor | None) -> bool:
        """Checks the gradient norm, and returns whether the optimizer step must be skipped.

        If the step is not skipped, `on_pre_optimizer_step` is sent.

        Args:
            norm: the norm of all gradients; None if it was not computed.

        Shapes:
            norm: a scalar tensor.

        Raises:
            TrainingError: FG818 or FG650 if the norm is bad and the run must end.
        """
        self._set_phase("update")
        self.clock.enter("update")
        if self.guard.gradients(norm, self.session.state.global_step + 1):
            return True
        self.session.send("on_pre_optimizer_step")
        # From here to the end of `finish_step` weights and counters disagree: a checkpoint would be wrong.
        self.in_update = True
        return False

    def rewind(self, window: Window) -> None:
        """Restores the newest intact checkpoint from which the current state descends.

        Args:
            window: the micro-batches of the bad step.

        Raises:
            TrainingError: FG652 if there is no such checkpoint.
            CheckpointError: if a background save failed, or the list of skipped steps could not be written.
            KeyboardInterrupt: on every process, if one process was asked to stop during the step.
        """
        bad = self.session.state.global_step + 1
        phase.set_phase("going back to a checkpoint", bad)
        self.clock.flush(wait=True)
        self.clock.drop()
        self.communication.close()
        self.sync.set_host_counts(window)
        with self.meter.paused():
            self.saver.report_finished(wait=True)
            folder = self._rewind_target.take(bad, self.skips, self.saver.writer.run_id)
            loaded = self._restore(folder)
            import_states(self.session, loaded.progress.stateful_callbacks, settings=False)  # type: ignore[arg-type]
        self.saver.begin()
        self._windows.renew()
        _log.warning("step %d: the run goes back to %s", bad, folder)
        self.session.send("on_rewind")
        # Not before: the lines of metrics after the checkpoint have just been removed.
        self.report_bad_step()
        self._do_pending_actions()
        self.stop_if_asked()

    def after_update(self) -> None:
        """Sends `on_optimizer_step`, after the optimizer has changed the weights."""
        self.session.send("on_optimizer_step")

    @property
    def present_learning_rate(self) -> float:
        """The current learning rate of the parameters that no setting gives another one."""
        assert self.strategy.optimizer is not None, "a run has an optimizer"  # noqa: S101
        return float(base_group(self.strategy.optimizer)["lr"])

    def _rates_of_groups(self) -> dict[str, float]:
        """Returns the learning rates of the named groups in the last step. Collective if a rank has some of them."""
        every = [self._rates]
        if self._has_groups and self.strategy.layout.pipeline_parallel_size > 1:
            every = collectives.all_gather(self._rates)
        return {f"learning_rate/{name}": rate for rates in every for name, rate in rates.items()}

    def finish_step(self, loss: float | Tensor | None, update: Update, window: Window) -> None:
        """Advances the learning rate schedule, the data position and the step count; then logs, evaluates and saves.

        Logging, evaluating and saving are done only if they are due.

        Args:
            loss: the loss of the step; None if the step was skipped.
            update: the result of the optimizer step.
            window: the micro-batches of the step.

        Shapes:
            loss: a Python number or a scalar tensor.

        Raises:
            KeyboardInterrupt: on every process, if one process was asked to stop during the step.
        """
        state, control = self.session.state, self.session.control
        self.clock.enter(None)
        if self.communication.is_measured:
            with self.meter.paused():
                self.communication.end_step()
        self.sync.set_host_counts(window)
        # Read before the schedule steps: the log line shows the rate that this step used.
        learning_rate = self.present_learning_rate
        self._rates = rates_by_name(self.strategy.optimizer) if self._has_groups else {}
        # A skipped step changes no weights, so it does not use up a step of the schedule either.
        if not (update.skipped or self._follows_metric):
            self._scaled.step()
        self.meter.add(loss, update, window, learning_rate=learning_rate)
        self.data.advance(window)
        state.global_step += 1
        state.epoch = self.data.epoch + self.data.batch / self._num_batches
        if self._average is not None and not update.skipped:
            self._average.update(state.global_step)
        if self._counts_tokens:
            skips_padding = self.args.include_num_input_tokens_seen == "non_padding"
            state.num_input_tokens_seen += window.num_unpadded if skips_padding else window.num_tokens
        self.in_update = False
        self.recompilations.end_step(state.global_step)
        self.clock.finish(state.global_step, loss, update, window, self.guard.bad)
        after_step(self.args, state, control)
        control.should_save |= self.saver.is_due()
        self.session.send("on_step_end")
        self.saver.report_finished(wait=False)
        self.requests.receive(self)
        self._log_evaluate_save()
        self.stop_if_asked()
        self.requests.act(self)
        self._set_phase("reading data")

    def stop_if_asked(self, *, now: bool = False) -> None:
        """Ends the run on all processes if one process was asked to stop.

        Args:
            now: whether to include requests that arrived after the last exchange of requests between processes.

        Raises:
            KeyboardInterrupt: on every process, if one process was asked to stop.
        """
        if (error := self.sync.exchange_stop() if now else self.sync.stop_error()) is not None:
            self.stops_together = True
            raise error

    def finish_epoch(self, *, complete: bool) -> None:
        """Sends `on_epoch_end`; logs, evaluates and saves if that is due.

        Args:
            complete: whether the epoch ended because the data ended or a callback requested the end of the epoch. It is
                false if the run ends within the epoch.

        Raises:
            TrainingError: FG803 if the epoch had no rows.
            KeyboardInterrupt: on every process, if one process was asked to stop.
        """
        state = self.session.state
        if complete and self.data.batch == 0:
            raise TrainingError(
                f"the training data gave no rows in epoch {self.data.epoch}",
                code="FG803",
                hint="an iterable data set must start from the beginning each time it is iterated",
            )
        if complete:
            self._cut_short |= self.data.num_batches is not None and not self.data.at_end_of_epoch
            self.data.next_epoch()
            state.epoch = float(self.data.epoch) if self.data.num_batches else state.epoch
        after_epoch(self.args, state, self.session.control)
        self.session.send("on_epoch_end")
        self._log_evaluate_save()
        self.stop_if_asked()

    def _log_evaluate_save(self) -> None:
        # Before anything collective: a process whose callback alone set a flag would enter a save without the others.
        self._agree_on_control()
        if self.session.control.should_log and self.meter.has_steps:
            self.log()
        self._evaluate_save()

    def _evaluate_save(self) -> None:
        """Evaluates and saves, if that is due. A resumed run repeats an evaluation that was interrupted."""
        control = self.session.control
        takes_long = control.should_evaluate or control.should_save
        if control.should_evaluate:
            self.evaluate()
        # An evaluation that was interrupted leaves its flag set: the checkpoint of the end stores it as pending.
        if control.should_save and not control.should_evaluate:
            self.save()
        # Stop requests that came during this time are exchanged now, instead of after the next step.
        if takes_long:
            self.sync.exchange_stop()

    def _agree_on_control(self) -> None:
        self.sync.control(self.session.control, self.session.dispatcher)

    def log(self) -> None:
        """Sends the metrics since the last log line to the callbacks."""
        began = time.perf_counter()
        self.guard.poll(wait=True)
        line = self.meter.line(data_seconds=self.clock.take_data_seconds(), since=began)
        values = line | self._rates_of_groups() | self.tokens_seen()
        # The line has waited for the device. A checkpoint of this step must not lack what callbacks keep of its steps.
        self.clock.flush(wait=True)
        values |= self.utilization.metrics(values, document_length=self.meter.document_length)
        values |= self.recompilations.metrics() | self.communication.metrics()
        # A checkpoint of this step that exists already lacks this line and has the sums of the line before.
        self.saver.written_step = -1
        with self.meter.paused():
            self.session.log(values)
        self._agree_on_control()

    def tokens_seen(self) -> dict[str, int]:
        """Returns the number of input tokens of all steps, if it is asked for and the inputs are tokens."""
        if self.args.include_num_input_tokens_seen == "no" or not self._counts_tokens:
            return {}
        return {"num_input_tokens_seen": self.session.state.num_input_tokens_seen}

    def evaluate(self) -> None:
        """Evaluates the model, and records whether it is the best one so far.

        If the evaluation is interrupted, the control flag `should_evaluate` stays set, so that a resumed run evaluates
        again.
        """
        if self._evaluate is None:
            self.session.control.should_evaluate = False
            return
        phase.set_phase("evaluation", self.session.state.global_step)
        with self.meter.paused():
            metrics = self._evaluate(self.sync.wants_end)
        if metrics is None:
            return
        self._agree_on_control()
        self.saver.written_step = -1  # a checkpoint of this step that exists already lacks this metric
        if not self.saver.best.is_followed:
            return
        value = self.saver.best.value_in(metrics)
        if self._follows_metric:
            self._scaled.step(value)
        self.saver.after_evaluation(value)

    def save(self) -> Path:
        """Writes a checkpoint of the current step, or starts a background save, and returns the checkpoint's folder."""
        with self.meter.paused():
            # A bad step that is still unread on the device must end the run before its weights are saved.
            self.guard.poll(wait=True)
            self.clock.flush(wait=True)
            folder = self.saver.save()
        self._rewind_target.add(folder)
        return folder

    def end_saves(self) -> None:
        """Writes a checkpoint of the last step if there is none yet, and waits for background saves."""
        with self.meter.paused():
            self.guard.poll(wait=True)
            self.clock.flush(wait=True)
            self.saver.end()

    def wait_for_background_save(self) -> None:
        """Waits for the background save of a run that has failed, unless an immediate stop was requested.

        Raises:
            CheckpointError: if the checkpoint could not be written.
        """
        if not self.sync.interrupt.at_once:
            self.saver.wait_after_failure(alone=not self.may_save)

    def _training_state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint stores in addition to weights and optimizer state, by part."""
        path = getattr(self.strategy.rule, "path", None)
        return {
            "guard": self.guard.state_dict(),
            "skips": self.skips.state(),
            "schedule": self.schedule.state_dict(),
            "classes": {"optimizer": type(self.strategy.optimizer).__name__, "schedule": type(self.schedule).__name__},
            "data": self.data.state_dict(),
            "meter": self.meter.state_dict(),
            "rng": gathered_rng(),
            "owed": pending_actions(self.session.control),
            "control": self.requests.state_dict(),
            "meanings": self._meanings,
            **({} if path is None else {"loss": path.state_dict()}),
            **({} if self._average is None else {"average": self._average.state_dict()}),
        }

    def load(self, folder: Path) -> None:
        """Restores a verified checkpoint, which this run or another one wrote.

        Raises:
            CheckpointError: the errors of `restore_checkpoint`; FG653 if a list of skipped steps cannot be read.
        """
        loaded = self._restore(folder, Meanings(self.saver.description_files(), self._meanings))
        checkpoints = self.saver.writer
        if not is_of_transformers(folder):
            checkpoints.inherit(read_manifest(folder))
        checkpoints.run_id = origin_of(folder).run or checkpoints.run_id
        self.skips.merge([*loaded.skips, *self._rewind_target.skipped_before(folder, checkpoints.run_id)])
        settings = self.args.restore_callback_states_from_checkpoint
        import_states(self.session, loaded.progress.stateful_callbacks, settings=settings)  # type: ignore[arg-type]

    def _restore(self, folder: Path, meanings: Meanings | None = None) -> RestoredState:
        is_theirs = is_of_transformers(folder)
        parts = (folder, self.args, self.strategy, self.schedule, self.data)
        if is_theirs:
            loaded = restore_transformers(*parts, meanings=meanings or Meanings())
        else:
            loaded = restore_checkpoint(*parts, self.meter, meanings=meanings, average=self._average)
        saved, step = loaded.progress, loaded.progress.global_step
        self.guard.load_state_dict(loaded.guard)
        with restoring("control", folder):
            self.requests.load_state_dict(loaded.control)
        # Random states are restored later: callbacks of `on_train_begin` and `on_epoch_begin` may draw numbers before.
        self._pending, self._rng = loaded.pending, loaded.rng
        # The states of another number of processes do not fit; a new seed avoids repeating the numbers of step 0.
        if self._rng is None:
            seed_process(self.args.seed, self.strategy.topology, step=step)
        self.saver.stored_step = step
        is_own = folder.resolve() == checkpoint_folder(self.saver.output_dir, step).resolve()
        self.saver.written_step = step if is_own and not is_theirs else -1
        state = self.session.state
        for name in _CARRIED:
            setattr(state, name, getattr(saved, name))
        folders = (self.saver.output_dir, folder.parent)
        state.best_model_checkpoint = resume.current_folder(state.best_model_checkpoint, *folders)
        return loaded


_CARRIED = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""The fields of the trainer state that a resumed run takes from the checkpoint.

All other fields are computed from the training arguments of the resumed run.
"""
