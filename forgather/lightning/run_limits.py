"""Callbacks for words of Lightning's `Trainer` that are no settings: limits of a run's length, and torch's switches.

The events of a run go in; control flags and torch's global switches are changed.
"""

from __future__ import annotations

from typing import Any

import torch

from forgather.ml.callbacks.base import TrainerCallback, TrainerControl, TrainerState


class RunLimits(TrainerCallback):
    """Lightning's limits of the length of a run, where two of them apply at once.

    Args:
        max_epochs: the number of epochs after which the run ends, also if `max_steps` has not been reached; None for
            no such limit.
        min_epochs, min_steps: the epochs and optimizer steps before which no callback ends the run; None for none.
    """

    def __init__(
        self, *, max_epochs: int | None = None, min_epochs: int | None = None, min_steps: int | None = None
    ) -> None:
        self._max_epochs, self._min_epochs, self._min_steps = max_epochs, min_epochs or 0, min_steps or 0
        self._was_asked = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Delays a stop that comes too early."""
        self._hold_back(state, control)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Delays a stop that comes too early."""
        self._hold_back(state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Delays a stop that comes too early; ends the run after `max_epochs`."""
        self._hold_back(state, control)
        if self._max_epochs is not None and round(state.epoch or 0, 6) >= self._max_epochs:
            control.should_training_stop = True

    def _hold_back(self, state: TrainerState, control: TrainerControl) -> None:
        # The end of `max_steps` is no request of a callback.
        if state.global_step >= state.max_steps > 0:
            return
        self._was_asked |= control.should_training_stop
        is_early = state.global_step < self._min_steps or round(state.epoch or 0, 6) < self._min_epochs
        if is_early:
            control.should_training_stop = False
        elif self._was_asked:
            control.should_training_stop = True


class TorchSwitches(TrainerCallback):
    """torch's switches for the time of a run; they are restored at its end.

    Args:
        deterministic: whether torch uses deterministic algorithms only; "warn" reports operations without one.
        benchmark: whether cuDNN measures which algorithm is fastest.
        detect_anomaly: whether backward passes report the operation that gave NaN.
    """

    def __init__(
        self,
        *,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        detect_anomaly: bool | None = None,
    ) -> None:
        self._deterministic, self._benchmark, self._detect_anomaly = deterministic, benchmark, detect_anomaly
        self._before: tuple[bool, bool, bool, bool] | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Sets the switches."""
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.is_anomaly_enabled(),
        )
        if self._deterministic is not None:
            torch.use_deterministic_algorithms(bool(self._deterministic), warn_only=self._deterministic == "warn")
        if self._benchmark is not None:
            torch.backends.cudnn.benchmark = self._benchmark
        elif self._deterministic:
            # Lightning's rule: the fastest algorithm may differ from run to run.
            torch.backends.cudnn.benchmark = False
        if self._detect_anomaly is not None:
            torch.autograd.set_detect_anomaly(self._detect_anomaly)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **details: Any) -> None:
        """Restores the switches."""
        if self._before is not None:
            deterministic, warns, torch.backends.cudnn.benchmark, anomaly = self._before
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
            torch.autograd.set_detect_anomaly(anomaly)
