"""Numbers on their way from a device to the host.

Takes a tensor; gives its numbers when they are asked for. Keeps true: the copy begins at once and waits for nothing
that is queued afterwards, so whoever asks a step later finds it there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from forgather.ml.memory import memory_facts
from forgather.ml.types import Update, Window


class AsyncHostCopy:
    """A copy of a small tensor that is under way.

    Args:
        values: of any shape, on any device.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.Event | None = None
        self._values = values
        if values.device.type != "cpu":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._event = torch.accelerator.current_stream(values.device).record_event()

    @property
    def is_there(self) -> bool:
        """True where reading waits for nothing."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Returns the numbers on the host; waits for what was queued before they were copied."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


@dataclass(slots=True)
class _Sums:
    """What is added up over steps.

    Args:
        loss: of the steps that have one.
        losses: how many these are.
        steps: all steps.
        skipped: steps that were left out.
    """

    loss: float | Tensor = 0.0
    losses: int = 0
    steps: int = 0
    skipped: int = 0


class Meter:
    """Sums over the steps since the last line, and since the start; a resumed run has the losses of all its steps."""

    def __init__(self, device: torch.device, *, counts_tokens: bool = True) -> None:
        self.device = device
        self.counts_tokens = counts_tokens
        self.total_rows = 0
        self.total_tokens = 0
        self.grad_norm: float | Tensor | None = None
        self.learning_rate = 0.0
        self._total = _Sums()
        self._line = _Sums()
        self._tokens = self._rows = 0
        self._resumed = 0
        self._own_steps = 0
        self._began = self._line_began = time.perf_counter()

    def start(self) -> None:
        """Begins to count time."""
        self._began = self._line_began = time.perf_counter()

    def add(self, loss: float | Tensor | None, update: Update, window: Window, *, learning_rate: float) -> None:
        """Counts a step; one that was left out as bad has no loss, and its norm is not that of an update."""
        self.learning_rate = learning_rate
        line = self._line
        line.steps += 1
        line.skipped += update.skipped
        if loss is not None:
            line.loss = line.loss + loss
            line.losses += 1
        self.grad_norm = None if update.skipped else update.grad_norm
        self._tokens += window.num_tokens
        self._rows += window.num_rows
        self.total_rows += window.num_rows

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
        return self._line.steps > 0

    def line(self) -> dict[str, float]:
        """Returns the numbers of the steps since the last line, and begins the next. Waits for the device."""
        line = self._line
        line.loss = float(line.loss)
        now = time.perf_counter()
        seconds = max(now - self._line_began, 1e-9)
        values: dict[str, float] = {}
        if line.losses:
            values["loss"] = line.loss / line.losses
        if self.grad_norm is not None:
            values["grad_norm"] = float(self.grad_norm)
        if line.skipped:
            values["skipped_steps"] = line.skipped
        values["learning_rate"] = self.learning_rate
        if self.counts_tokens:
            values["tokens_per_second"] = self._tokens / seconds
        else:
            values["samples_per_second"] = self._rows / seconds
        values["steps_per_second"] = (line.steps - self._resumed) / seconds
        values |= memory_facts(self.device)
        self._close_line()
        self._line_began = now
        return values

    def _close_line(self) -> None:
        line, total = self._line, self._total
        self._total = _Sums(
            total.loss + float(line.loss),
            total.losses + line.losses,
            total.steps + line.steps,
            total.skipped + line.skipped,
        )
        self.total_tokens += self._tokens
        self._own_steps += line.steps - self._resumed
        self._line, self._tokens, self._rows, self._resumed = _Sums(), 0, 0, 0

    def summary(self) -> dict[str, float]:
        """Returns the numbers of the whole run, and ends it. Waits for the device."""
        if self.has_steps:
            self._close_line()
        seconds = max(time.perf_counter() - self._began, 1e-9)
        values = {"train_runtime": seconds}
        if self._own_steps:  # a run that had nothing left to do has no speed
            values["train_samples_per_second"] = self.total_rows / seconds
            values["train_steps_per_second"] = self._own_steps / seconds
            if self.counts_tokens:
                values["train_tokens_per_second"] = self.total_tokens / seconds
        if self._total.losses:
            values["train_loss"] = float(self._total.loss) / self._total.losses
        if self._total.skipped:
            values["train_skipped_steps"] = self._total.skipped
        return values

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of an unfinished line, and of the lines before. Waits for the device."""
        self._line.loss = float(self._line.loss)
        totals = {f"total_{name}": value for name, value in asdict(self._total).items()}
        last = {} if self.grad_norm is None else {"grad_norm": float(self.grad_norm)}
        return {**asdict(self._line), **totals, **last, "learning_rate": self.learning_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with an unfinished line; its rates count the steps of this process alone.

        Earlier releases left no step out, and some kept no sums of all steps: the mean is that of the later ones there.
        """
        self._line = _Sums(state["loss"], state.get("losses", state["steps"]), state["steps"], state.get("skipped", 0))
        steps = state.get("total_steps", 0)
        losses, skipped = state.get("total_losses", steps), state.get("total_skipped", 0)
        self._total = _Sums(state.get("total_loss", 0.0), losses, steps, skipped)
        self._resumed = self._line.steps
        self.grad_norm, self.learning_rate = state.get("grad_norm"), state.get("learning_rate", 0.0)
