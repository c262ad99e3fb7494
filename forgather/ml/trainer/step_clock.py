"""The measurements of each optimizer step: how long its parts take, its loss and its gradient norm.

`StepClock` is told when a part of a step begins, and gives a `StepRecord` for each step. On an accelerator, the loss
and the norm are copied to the host asynchronously, so a record may be sent a few steps after its step; the host never
waits for it. If no callback wants records, a step costs a few readings of the clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forgather.ml.host_reads import host_can_read
from forgather.ml.trainer.meter import AsyncHostCopy
from forgather.ml.types import StepRecord, Update, Window


class StepClock:
    """Measures the parts of optimizer steps.

    Args:
        is_heard: a function that returns whether any callback wants records.
        send: a function that sends a record to the callbacks.
    """

    PARTS = ("data", "forward_backward", "sync", "update")

    def __init__(self, is_heard: Callable[[], bool], send: Callable[[StepRecord], None]) -> None:
        self._is_heard = is_heard
        self._send = send
        self._seconds = dict.fromkeys(self.PARTS, 0.0)
        self._data_seconds = 0.0
        self._part: str | None = None
        self._since = 0.0
        # A queue: the device may be several steps behind the host.
        self._pending: deque[tuple[StepRecord, tuple[str, ...], AsyncHostCopy | None]] = deque()

    def enter(self, part: str | None) -> None:
        """Begins a part of the step; None begins something that is no part of a step, such as an evaluation."""
        now = time.perf_counter()
        if self._part is not None:
            self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def reading(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yields the windows of this rank. The time in which they are read counts as "data"."""
        while True:
            self.enter("data")
            window = next(windows, None)
            # What follows until the forward pass is the sum of the counts of all ranks.
            self.enter("sync")
            if window is None:
                return
            yield window

    def finish(self, step: int, loss: float | Tensor | None, update: Update, window: Window, bad: str | None) -> None:
        """Ends a step, and sends the records whose values are on the host.

        Args:
            step: the number of the step.
            loss: the loss of the step; None if the step was skipped.
            update: the result of the update, whose gradient norm is read.
            window: the micro-batches of the step, whose number of tokens over all ranks is read.
            bad: what was wrong with a skipped step; None if nothing was.

        Shapes:
            loss: a Python number or a scalar tensor.
        """
        self.enter(None)
        self._data_seconds += self._seconds["data"]
        if self._is_heard():
            seconds = {f"{part}_seconds": value for part, value in self._seconds.items()}
            record = StepRecord(step=step, loss=None, bad=bad, num_tokens=window.num_tokens, **seconds)
            self._add(record, loss=loss, grad_norm=update.grad_norm)
            self.flush()
        self._restart()

    def take_data_seconds(self) -> float:
        """Returns the time in which this rank waited for its rows, over the steps since the last call.

        Units:
            seconds.
        """
        taken, self._data_seconds = self._data_seconds, 0.0
        return taken

    def _restart(self) -> None:
        self._seconds = dict.fromkeys(self.PARTS, 0.0)

    def drop(self) -> None:
        """Forgets the measurements of a step that does not count, because the run goes back to a checkpoint."""
        self.enter(None)
        self._restart()

    def _add(self, record: StepRecord, **values: float | Tensor | None) -> None:
        on_device = {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and not host_can_read(value.device)
        }
        known: dict[str, Any] = {name: _number(value) for name, value in values.items() if name not in on_device}
        record = replace(record, **known)
        copy = None
        if on_device:
            # One copy for all values: each one costs a launch.
            copy = AsyncHostCopy(torch.stack([value.detach().float().reshape(()) for value in on_device.values()]))
        self._pending.append((record, tuple(on_device), copy))

    def flush(self, *, wait: bool = False) -> None:
        """Sends the records whose values have reached the host.

        Args:
            wait: whether to wait for the values of all steps.
        """
        while self._pending:
            record, names, copy = self._pending[0]
            if copy is not None:
                if not (wait or copy.is_there):
                    return
                record = replace(record, **dict(zip(names, copy.read().tolist(), strict=True)))
            self._pending.popleft()
            self._send(record)


def _number(value: float | Tensor | None) -> float | None:
    return None if value is None else float(value)
