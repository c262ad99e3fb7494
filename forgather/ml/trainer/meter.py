"""Training metrics: loss, gradient norm, learning rate, throughput and memory, as a log line reports them.

`AsyncHostCopy` copies a small tensor to host memory asynchronously: the copy is queued at once and does not wait for
work that is queued on the device later. `Meter` adds up the losses and the numbers of steps, tokens and rows. Of the
gradient norm and the learning rate it keeps the last value. It returns the metrics of a log line and of the whole run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from forgather.ml.host_reads import host_can_read
from forgather.ml.memory import memory_facts
from forgather.ml.types import Update, Window


class AsyncHostCopy:
    """An asynchronous copy of a small tensor to host memory.

    Args:
        values: the tensor to copy, on any device.

    Shapes:
        values: any shape. `read` returns a tensor of the same shape.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.Event | None = None
        self._values = values
        if values.device.type == "cpu":
            # The next step may write into the same memory.
            self._values = values if host_can_read(values.device) else values.clone()
        else:
            # A copy to pageable memory would wait for the device.
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._event = torch.accelerator.current_stream(values.device).record_event()

    @property
    def is_there(self) -> bool:
        """True if the copy is complete, so that `read` returns without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Waits until the transfer to host memory is done, and returns the transferred tensor.

        Shapes:
            Returns a tensor of the shape of the copied tensor.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._values


@dataclass(slots=True)
class _Sums:
    """The sum of the losses of several optimizer steps, and counts of these steps.

    Args:
        loss: the sum of the losses of the steps that have a loss.
        losses: the number of steps that have a loss.
        steps: the number of all steps, including skipped ones.
        skipped: the number of skipped steps.
    """

    loss: float | Tensor = 0.0
    losses: int = 0
    steps: int = 0
    skipped: int = 0


class Meter:
    """Sums up the metrics of the steps since the last log line, and since the start of the run.

    The mean loss of a resumed run covers all steps of the run. Rates cover only the steps since the resume.

    Args:
        device: the device whose memory use is reported.
        counts_tokens: whether log lines report tokens per second instead of samples per second.

    Units:
        Rates are per second of wall time, over all data-parallel ranks. Losses have the unit of the loss function.
    """

    def __init__(self, device: torch.device, *, counts_tokens: bool = True) -> None:
        self.device = device
        self.counts_tokens = counts_tokens
        self.total_rows = 0
        self.total_tokens = 0
        self.grad_norm: float | Tensor | None = None
        self.learning_rate = 0.0
        self.document_length: float | None = None
        """The length of the document of a token, as a mean over the tokens of the last line; None if it is unknown."""
        self._total = _Sums()
        self._line = _Sums()
        self._tokens = self._rows = self._pairs = 0
        # Steps of the current line that were trained before a resume: rates must not include them.
        self._resumed = 0
        self._own_steps = 0
        self._began = self._line_began = time.perf_counter()

    def start(self) -> None:
        """Starts the clock of the run and of the first log line."""
        self._began = self._line_began = time.perf_counter()

    def add(self, loss: float | Tensor | None, update: Update, window: Window, *, learning_rate: float) -> None:
        """Adds an optimizer step to the sums.

        Args:
            loss: the loss of the step; None if the step was skipped.
            update: the result of the update, from which the gradient norm and whether the step was skipped are read.
            window: the micro-batches of the step, whose numbers of tokens and rows are read.
            learning_rate: the learning rate that the step used.

        Shapes:
            loss: a Python number or a scalar tensor.
        """
        self.learning_rate = learning_rate
        line = self._line
        line.steps += 1
        line.skipped += update.skipped
        if loss is not None:
            # Not `+=`: that would change the caller's tensor in place. The sum stays on the device until the line is
            # read.
            line.loss = line.loss + loss
            line.losses += 1
        # The norm of a skipped step belongs to no update.
        self.grad_norm = None if update.skipped else update.grad_norm
        self._tokens += window.num_tokens
        self._rows += window.num_rows
        self._pairs += window.num_pairs
        self.total_rows += window.num_rows

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that excludes the time of its body from the rates of the current log line."""
        # Only the clock of the line moves: the runtime of the whole run includes evaluations and saves.
        began = time.perf_counter()
        try:
            yield
        finally:
            self._line_began += time.perf_counter() - began

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Context manager that excludes the time of its body, such as a pause by the user, from all rates."""
        began = time.perf_counter()
        try:
            with self.paused():
                yield
        finally:
            self._began += time.perf_counter() - began

    @property
    def has_steps(self) -> bool:
        """True if there were steps since the last log line."""
        return self._line.steps > 0

    def line(self, *, data_seconds: float | None = None, since: float | None = None) -> dict[str, float]:
        """Returns the metrics since the last log line, and starts a new one. Synchronizes with the device.

        Args:
            data_seconds: the time in which this rank waited for rows since the last line; None if it is unknown.
            since: when the host began to wait for the device because of this line; None for now.

        Units:
            seconds; `since` on the clock `time.perf_counter`.
        """
        line = self._line
        began = time.perf_counter() if since is None else since
        # Read before the clock: the steps are finished only when the device is.
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
        if data_seconds is not None:
            values["data_wait_share"] = min(1.0, data_seconds / seconds)
        if not host_can_read(self.device):
            # The device has finished what the host had queued.
            values["host_ahead_seconds"] = now - began
        values |= memory_facts(self.device)
        self.document_length = self._pairs / self._tokens if self._pairs and self._tokens else None
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
        self._line, self._resumed = _Sums(), 0
        self._tokens = self._rows = self._pairs = 0

    def summary(self) -> dict[str, float]:
        """Returns the metrics of the whole run. Synchronizes with the device."""
        if self.has_steps:
            self._close_line()
        seconds = max(time.perf_counter() - self._began, 1e-9)
        values = {"train_runtime": seconds}
        if self._own_steps:  # a run resumed at its last step has no rates
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
        """Returns the sums since the last log line, and the sums of all earlier steps. Synchronizes with the device."""
        self._line.loss = float(self._line.loss)
        totals = {f"total_{name}": value for name, value in asdict(self._total).items()}
        last = {} if self.grad_norm is None else {"grad_norm": float(self.grad_norm)}
        return {**asdict(self._line), **totals, **last, "learning_rate": self.learning_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the sums of a checkpoint.

        The next log line reports the mean loss of all steps since the last line before the checkpoint, and the rates of
        the steps since the resume. Earlier releases did not skip steps, and some did not store sums over all steps; the
        mean loss of the run then covers only the steps that the sums contain.

        Args:
            state: the state that `state_dict` returned, in this release or an earlier one.
        """
        self._line = _Sums(state["loss"], state.get("losses", state["steps"]), state["steps"], state.get("skipped", 0))
        steps = state.get("total_steps", 0)
        losses, skipped = state.get("total_losses", steps), state.get("total_skipped", 0)
        self._total = _Sums(state.get("total_loss", 0.0), losses, steps, skipped)
        self._resumed = self._line.steps
        self.grad_norm, self.learning_rate = state.get("grad_norm"), state.get("learning_rate", 0.0)
