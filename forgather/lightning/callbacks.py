"""Lightning's callbacks, with Lightning's argument names and defaults.

`ModelCheckpoint` and `GradientAccumulationScheduler` are plain data: `forgather.lightning:Trainer` reads them as
settings. The others are callbacks of our trainers, which a config may also use by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forgather.errors import TrainingError, nearest
from forgather.lightning.durations import seconds_of
from forgather.lightning.option_rules import wrong_options
from forgather.ml.callbacks.base import ExportableState, TrainerCallback, TrainerControl, TrainerState
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.trainer.argument_checks import SettingError
from forgather.value_text import is_one_of, shown

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelCheckpoint:
    """When checkpoints are written, and which of them are kept. A checkpoint is a folder `checkpoint-<step>`.

    Args:
        dirpath: the folder of the checkpoints.
        filename: a pattern as "model-{epoch:02d}". Each checkpoint gets a link of this name, with the ending ".ckpt".
        monitor: the metric by which checkpoints are ranked; None keeps the newest ones.
        verbose: without effect; checkpoints are in the record of a run.
        save_last: whether the newest checkpoint is kept, too, with the link "last.ckpt".
        save_top_k: the number of checkpoints to keep; -1 keeps all, 0 writes none.
        save_on_exception: refused; a run that is interrupted writes a checkpoint anyway.
        save_weights_only: whether checkpoints omit the training state.
        mode: "min" or "max", which value of the metric is best.
        auto_insert_metric_name: whether a link has the names of the values, as in "model-epoch=02.ckpt".
        every_n_train_steps, every_n_epochs, train_time_interval: the interval, in optimizer steps, epochs, or as a
            timedelta; one of them. After each epoch by default.
        save_on_train_epoch_end: without effect; the checkpoint of an epoch is written after its validation.
        enable_version_counter: whether a second checkpoint of the same name gets the ending "-v1"; otherwise the link
            is replaced.

    After `fit`, `best_model_path` and `last_model_path` are the folders of the best and of the newest checkpoint ("" if
    there is none), and `best_model_score` is the metric of the best one. Without `monitor`, the newest one is the best.
    """

    best_model_path: ClassVar[str] = ""
    last_model_path: ClassVar[str] = ""
    best_model_score: ClassVar[float | None] = None

    dirpath: str | Path | None = None
    filename: str | None = None
    monitor: str | None = None
    verbose: bool = False
    save_last: bool | str | None = None
    save_top_k: int = 1
    save_on_exception: bool = False
    save_weights_only: bool = False
    mode: str = "min"
    auto_insert_metric_name: bool = True
    every_n_train_steps: int | None = None
    train_time_interval: Any = None
    every_n_epochs: int | None = None
    save_on_train_epoch_end: bool | None = None
    enable_version_counter: bool = True

    def set_saved(self, *, best: str, last: str, score: float | None) -> None:
        """Sets what scripts read after `fit`.

        Args:
            best: the folder of the best checkpoint, or "".
            last: the folder of the newest checkpoint, or "".
            score: the metric of the best one, or None.
        """
        # Not fields: they are no options, and `fgcli` compares options.
        for name, value in (("best_model_path", best), ("last_model_path", last), ("best_model_score", score)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class GradientAccumulationScheduler:
    """The number of micro-batches of an optimizer step, where it changes.

    Args:
        scheduling: a mapping from an epoch, counted from 0, to the number that applies from then on, as {0: 8, 5: 4}.
    """

    scheduling: Mapping[int, int]


def _refuse_wrong_options(name: str, options: Mapping[str, Any]) -> None:
    for option, expected in wrong_options(name, options):
        message = f"{name}: {option} is {shown(options[option])}"
        raise SettingError(message, code="FG813", hint=f"expected {expected}").about(option)


class EarlyStopping(TrainerCallback, ExportableState):
    """Ends a run when a metric of the evaluations no longer improves.

    Args:
        monitor: the name of the metric, with or without "eval_".
        min_delta: the change that counts as an improvement.
        patience: the number of evaluations without an improvement after which the run ends.
        verbose: whether the reason is logged.
        mode: "min" or "max", which value of the metric is best.
        strict: whether a missing metric is an error.
        check_finite: whether a metric that is not finite ends the run.
        stopping_threshold: the value that is good enough; None for none.
        divergence_threshold: the value from which on training has failed; None for none.
        check_on_train_epoch_end: the metric is compared after each evaluation, whatever the value.
        log_rank_zero_only: whether only the main process logs the reason, which is always so.

    Raises:
        SettingError: FG813 if `mode` or `patience` is not one of the allowed values.

    Source:
        `EarlyStopping` of Lightning 2.6. transformers' `EarlyStoppingCallback` differs where `min_delta` is not 0: it
        compares with the best value, and this class with the last value that counted as an improvement.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        _refuse_wrong_options("EarlyStopping", locals())
        if not is_one_of(mode, ("min", "max")):
            raise SettingError(f"EarlyStopping: mode is {shown(mode)}", code="FG813", hint='expected "min" or "max"')
        self._options: dict[str, Any] = {
            "monitor": monitor,
            "min_delta": min_delta,
            "patience": patience,
            "verbose": verbose,
            "mode": mode,
            "strict": strict,
            "check_finite": check_finite,
            "stopping_threshold": stopping_threshold,
            "divergence_threshold": divergence_threshold,
            "check_on_train_epoch_end": check_on_train_epoch_end,
            "log_rank_zero_only": log_rank_zero_only,
        }
        self.monitor, self.mode, self.patience = monitor, mode, patience
        self.min_delta = abs(min_delta) if mode == "max" else -abs(min_delta)
        self.wait_count, self.stopped_epoch = 0, 0
        self.best_score = math.inf if mode == "min" else -math.inf

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores: the arguments, and what changes during a run."""
        changing = {name: getattr(self, name) for name in ("wait_count", "stopped_epoch", "best_score")}
        return {"args": dict(self._options), "attributes": changing}

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **details: Any,
    ) -> None:
        """Compares the metric with the best one so far; ends the run if one of the conditions is true.

        Raises:
            TrainingError: FG821 if the evaluation gave no such metric, and `strict` is true.
        """
        found = dict(metrics or {})
        current = found.get(self.monitor, found.get(f"eval_{self.monitor}"))
        if current is None:
            if self._options["strict"]:
                raise TrainingError(
                    f"EarlyStopping monitors {self.monitor!r}, and the evaluation gave no such metric",
                    code="FG821",
                    hint=nearest(self.monitor, sorted(found)),
                )
            return
        reason = self._reason_to_stop(float(current))
        if reason is not None:
            control.should_training_stop = True
            self.stopped_epoch = int(state.epoch or 0)
            if self._options["verbose"] and state.is_world_process_zero:
                _log.warning("EarlyStopping: %s is %.6g, %s", self.monitor, current, reason)

    def _reason_to_stop(self, current: float) -> str | None:
        good, bad = self._options["stopping_threshold"], self._options["divergence_threshold"]
        if self._options["check_finite"] and not math.isfinite(current):
            return "which is not finite"
        if good is not None and self._is_better(current, good):
            return f"which is better than stopping_threshold {good}"
        if bad is not None and self._is_better(-current, -bad):
            return f"which is worse than divergence_threshold {bad}"
        # The sign of min_delta follows the mode, so that it makes an improvement harder in both.
        if self._is_better(current - self.min_delta, self.best_score):
            self.best_score, self.wait_count = current, 0
            return None
        self.wait_count += 1
        return f"and {self.wait_count} evaluations brought no improvement" if self.wait_count >= self.patience else None

    def _is_better(self, value: float, than: float) -> bool:
        return value < than if self.mode == "min" else value > than


class LearningRateMonitor(TrainerCallback):
    """The learning rate in the log. It is in each log line anyway, so this callback does nothing.

    Args:
        logging_interval: "step", "epoch" or None, all of which mean each log line.
        log_momentum: refused; log lines have no momentum.
        log_weight_decay: refused; log lines have no weight decay.

    Raises:
        SettingError: FG811 if momentum or weight decay is asked for, FG813 if the interval is not one of the three.
    """

    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        _refuse_wrong_options("LearningRateMonitor", locals())
        if logging_interval is not None and not is_one_of(logging_interval, ("step", "epoch")):
            message = f"LearningRateMonitor: logging_interval is {shown(logging_interval)}"
            raise SettingError(message, code="FG813", hint='expected "step", "epoch" or None')
        for name, value in (("log_momentum", log_momentum), ("log_weight_decay", log_weight_decay)):
            if value:
                message = f"LearningRateMonitor({name}=True) is not available"
                raise SettingError(message, code="FG811", hint="a log line has the learning rate alone")


class Timer(TrainerCallback, ExportableState):
    """Ends a run after a time.

    Args:
        duration: "DD:HH:MM:SS", a timedelta, or a mapping of its arguments; None for no limit.
        interval: "step" or "epoch", after which the time is compared.
        verbose: whether the end is logged.

    Raises:
        SettingError: FG813 if an argument is not one of the allowed values.
    """

    def __init__(
        self,
        duration: Any = None,
        interval: str = "step",
        verbose: bool = True,
        *,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._seconds = seconds_of(duration)
        if duration is not None and self._seconds is None:
            hint = 'expected "DD:HH:MM:SS", a timedelta, or a mapping of its arguments'
            raise SettingError(f"Timer: duration is {shown(duration)}", code="FG813", hint=hint)
        _refuse_wrong_options("Timer", locals())
        if not is_one_of(interval, ("step", "epoch")):
            raise SettingError(f"Timer: interval is {shown(interval)}", code="FG813", hint='expected "step" or "epoch"')
        self._interval, self._verbose, self._now = interval, verbose, time.monotonic if now is None else now
        self._since: float | None = None
        self.elapsed_seconds = 0.0

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores: the time that the run has taken so far."""
        limit = None if self._seconds is None else {"seconds": self._seconds}
        given = {"duration": limit, "interval": self._interval, "verbose": self._verbose}
        return {"args": given, "attributes": {"elapsed_seconds": self.time_elapsed()}}

    def time_elapsed(self) -> float:
        """Returns the time that the run has taken so far, in seconds; a resumed run continues to count."""
        return self.elapsed_seconds + (0.0 if self._since is None else self._now() - self._since)

    def time_remaining(self) -> float | None:
        """Returns the time that is left, in seconds; None if there is no limit."""
        return None if self._seconds is None else self._seconds - self.time_elapsed()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Starts the clock."""
        self._since = self._now()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Ends the run if the time has passed."""
        if self._interval == "step":
            self._compare(state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Ends the run if the time has passed."""
        if self._interval == "epoch":
            self._compare(state, control)

    def _compare(self, state: TrainerState, control: TrainerControl) -> None:
        remaining = self.time_remaining()
        # The clock of the main process: others read theirs at other times, and would stop at another step.
        if remaining is not None and collectives.broadcast_from_main([remaining <= 0])[0]:
            control.should_training_stop = True
            if self._verbose and state.is_world_process_zero:
                _log.warning("Timer: the run ends after %.0f seconds", self.time_elapsed())
