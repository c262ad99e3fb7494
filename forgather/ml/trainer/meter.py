"""What a log line says.

Takes losses, norms and token counts of steps; gives one line of plain numbers. Keeps true: nothing is
read from a device before a line is asked for; to a line, time spent evaluating and saving is no training time.

Units:
    tokens and steps per second: of a line, of training time; of the closing summary, of the whole call, as in
    transformers. Memory in bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forgather.ml.memory import memory_facts
from forgather.ml.types import Update, Window


class Meter:
    """Sums over the steps since the last line, and since the start; a resumed run has the losses of all its steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total_loss = 0.0
        self.total_steps = 0
        self.total_rows = 0
        self.total_tokens = 0
        self.grad_norm: Tensor | None = None
        self._loss: float | Tensor = 0.0
        self._steps = 0
        self._tokens = 0
        self._resumed = 0
        self._own_steps = 0
        self._began = self._line_began = time.perf_counter()

    def start(self) -> None:
        """Begins to count time."""
        self._began = self._line_began = time.perf_counter()

    def add(self, loss: float | Tensor, update: Update, window: Window) -> None:
        """Counts a step."""
        self._loss = self._loss + loss
        self._steps += 1
        self._tokens += window.num_tokens
        self.total_rows += window.num_rows
        self.grad_norm = update.grad_norm

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of the block out."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._line_began += time.perf_counter() - began

    @property
    def has_steps(self) -> bool:
        """True where a line would say something."""
        return self._steps > 0

    def line(self, learning_rate: float) -> dict[str, float]:
        """Returns the numbers of the steps since the last line, and begins the next. Waits for the device."""
        loss = float(self._loss)
        now = time.perf_counter()
        seconds = max(now - self._line_began, 1e-9)
        values: dict[str, float] = {"loss": loss / self._steps}
        if self.grad_norm is not None:
            values["grad_norm"] = float(self.grad_norm)
        values["learning_rate"] = learning_rate
        values["tokens_per_second"] = self._tokens / seconds
        values["steps_per_second"] = (self._steps - self._resumed) / seconds
        values |= memory_facts(self.device)
        self._close_line(loss)
        self._line_began = now
        return values

    def _close_line(self, loss: float) -> None:
        self.total_loss += loss
        self.total_steps += self._steps
        self.total_tokens += self._tokens
        self._own_steps += self._steps - self._resumed
        self._loss, self._steps, self._tokens, self._resumed = 0.0, 0, 0, 0

    def summary(self) -> dict[str, float]:
        """Returns the numbers of the whole run, and ends it. Waits for the device."""
        if self.has_steps:
            self._close_line(float(self._loss))
        seconds = max(time.perf_counter() - self._began, 1e-9)
        values = {"train_runtime": seconds}
        if self._own_steps:  # a run that had nothing left to do has no speed, and no loss
            values["train_samples_per_second"] = self.total_rows / seconds
            values["train_steps_per_second"] = self._own_steps / seconds
            values["train_tokens_per_second"] = self.total_tokens / seconds
            values["train_loss"] = self.total_loss / self.total_steps
        return values

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of an unfinished line, and of the lines before. Waits for the device."""
        total = {"total_loss": self.total_loss, "total_steps": self.total_steps}
        return {"loss": float(self._loss), "steps": self._steps, **total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with an unfinished line; its rates count the steps of this process alone."""
        self._loss = state["loss"]
        self._steps = self._resumed = state["steps"]
        # Earlier releases kept no sums of all steps: the mean is that of the later ones there.
        self.total_loss, self.total_steps = state.get("total_loss", 0.0), state.get("total_steps", 0)
