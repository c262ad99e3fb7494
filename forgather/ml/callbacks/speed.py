"""Training speed and memory for the logs of `transformers.Trainer`, which reports neither during training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from forgather.ml.callbacks.output_target import report_only
from forgather.ml.memory import memory_facts


class SpeedCallback(TrainerCallback):
    """A callback that adds speeds and memory to each log that has a `loss`; metrics that the log has are kept.

    It is meant for `transformers.Trainer`, and must come before the callbacks that write logs. It adds
    `steps_per_second` and the memory metrics. It also adds `tokens_per_second` if the trainer counts tokens
    (`include_num_input_tokens_seen: all`), and `samples_per_second` otherwise.

    Args:
        rows: a function that returns the number of rows that were trained on, or None to leave `samples_per_second`
            out.
    """

    def __init__(self, rows: Callable[[], int] | None = None) -> None:
        self._count_rows = rows or (lambda: 0)
        self._last = (0.0, 0, 0, 0)
        self._paused_seconds = 0.0
        self._paused_at = 0.0
        self._resumes_after_pause = False

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the time measurement."""
        self._restart(state)

    @report_only
    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, model: Any = None, **kwargs: Any
    ) -> None:
        """Adds speeds and memory to a training log."""
        # Evaluation logs have no `loss`; they must not reset the clock of the training steps.
        if not logs or "loss" not in logs:
            return
        began, step, tokens, rows = self._last
        seconds = time.perf_counter() - began - self._paused_seconds
        if state.global_step > step and seconds > 0:
            logs.setdefault("steps_per_second", (state.global_step - step) / seconds)
            if state.num_input_tokens_seen > tokens:
                logs.setdefault("tokens_per_second", (state.num_input_tokens_seen - tokens) / seconds)
            elif self._count_rows() > rows:
                logs.setdefault("samples_per_second", (self._count_rows() - rows) / seconds)
        for name, value in memory_facts(next(model.parameters()).device).items():
            logs.setdefault(name, value)
        self._restart(state)

    @report_only
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the time at the end of a step, at which an evaluation or a save may begin."""
        self._paused_at = time.perf_counter()

    @report_only
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Excludes the time since the previous step from the speeds if there was an evaluation or a save in between.

        Otherwise that time is included, because fetching data is part of training.
        """
        if self._paused_at and self._resumes_after_pause:
            # A log inside the pause has restarted the clock already; only the time since then is subtracted.
            self._paused_seconds += time.perf_counter() - max(self._paused_at, self._last[0])
        self._resumes_after_pause = False

    @report_only
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Marks the time until the next step as a pause, which is not counted as training time."""
        self._resumes_after_pause = True

    @report_only
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Marks the time until the next step as a pause, which is not counted as training time."""
        self._resumes_after_pause = True

    def _restart(self, state: Any) -> None:
        self._last = (time.perf_counter(), state.global_step, state.num_input_tokens_seen, self._count_rows())
        self._paused_seconds = 0.0
