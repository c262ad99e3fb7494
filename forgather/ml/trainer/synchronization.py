"""Synchronizes values between the processes of a run in each step: target counts, loss, norm, flags, stop requests.

With a single process there is no communication. With several processes each step has one all-reduce, after its backward
pass: the sum of the loss, of the squared gradient norm, of the stop requests, of the states of a background save, and
of the counts of the next window (the micro-batches of the next optimizer step), which is read one step ahead. The first
window of an epoch, and all windows if a callback of the user may change what is read, have an all-reduce of their own
for their counts.

On an accelerator the host does not wait for the all-reduce: it reads the counts and the stop requests one step later. A
stop request that a process receives before it has computed its loss stops the run at the end of the same step on a CPU,
and of the next step on an accelerator, or after an evaluation or save before that. The same sum tells all processes
that the main process has control requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forgather.interrupt import REQUEST_CODE, Interrupt
from forgather.ml.callbacks.base import TrainerControl
from forgather.ml.callbacks.dispatch import CallbackDispatcher
from forgather.ml.distributed import collectives
from forgather.ml.host_reads import host_can_read
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.meter import AsyncHostCopy
from forgather.ml.trainer.stream_windows import StreamPosition, agreed_windows
from forgather.ml.types import Window


@dataclass
class _Ahead:
    """A window that was read before its step.

    Args:
        window: the window; None if there is no further one.
        error: what reading it raised; it is raised again when the window is asked for.
        present: the number of ranks that have a further window.
    """

    window: Window | None = None
    error: Exception | None = None
    present: float | None = None


class _StepSums(NamedTuple):
    """The sums over all processes in the one all-reduce of a step, in the order in which they are sent.

    They are tensors on the device, or numbers that the host has read.

    Args:
        valid, tokens, rows, unpadded, pairs: the counts of the next window, if it was read ahead.
        stop: the codes of stop requests and control requests.
        present: the number of ranks that have a next window.
        save: the states of a background save.
        loss: the loss of this step.
        squares: the squared norm of its gradients.
    """

    valid: Any
    tokens: Any
    rows: Any
    unpadded: Any
    pairs: Any
    stop: Any
    present: Any
    save: Any
    loss: Any
    squares: Any


class RunSync:
    """The collectives of a run that are not part of the strategy.

    Args:
        strategy: the strategy, whose ranks contribute to sums.
        interrupt: the record of whether this process was asked to stop.
    """

    def __init__(self, strategy: Strategy, interrupt: Interrupt) -> None:
        topology = strategy.topology
        self.several = topology.world_size > 1
        self._strategy = strategy
        self.interrupt = interrupt
        self._device = topology.device
        self._counts_differ = topology.dp_size > 1
        # Ranks with the same rows have the same loss and counts: one of them contributes to the sums. Ranks that divide
        # the positions of the same rows have the same counts, and a part of the loss each.
        self._contributes = topology.has_loss and strategy.layout.position(topology.rank).tensor == 0
        self._contributes_counts = self._contributes and topology.cp_rank == 0
        self._source: Iterator[Window] | None = None
        self._has_length = True
        self._ahead: _Ahead | None = None
        self._sums: AsyncHostCopy | None = None
        self._stop_sum: collectives.AsyncSum | None = None
        self._stop: KeyboardInterrupt | None = None
        self.has_requests: Callable[[], bool] = bool
        """A function that returns whether control requests wait in this process; only the main process has any."""
        self._are_requests_known = False
        self.save_status: Callable[[], tuple[Any, float]] = _no_save
        """A function that returns a background save, or None, and the state of this process's part of it."""
        self.saves: tuple[Any, float] = (None, 0.0)
        """The background save of the sum that was read last, and the sum of its states over all processes."""
        self._save_of_sums: Any = None

    def windows(self, own: Iterator[Window], *, has_length: bool) -> Iterator[Window]:
        """Yields the windows of this process after summing their counts over all data-parallel ranks.

        A window is the micro-batches of one optimizer step. On an accelerator the number of targets stays on the
        device, and `set_host_counts` sets the numbers of tokens and rows later.

        Args:
            own: the windows of this process.
            has_length: whether the data has a known length, so that all processes have the same number of windows.

        Raises:
            DistributedError: FG855 if the data has no length and ends earlier on one process than on another.
        """
        self._source, self._has_length, self._ahead = own, has_length, None
        number = 0
        while True:
            ahead, self._ahead = self._ahead, None
            if ahead is None:
                window = next(own, None)
                if not has_length:
                    collectives.require_all_or_none(window is not None, number)
                if window is not None and self._counts_differ:
                    self._add_counts(window)
            else:
                window = self._taken(ahead, number)
            if window is None:
                return
            number += 1
            yield window

    def _taken(self, ahead: _Ahead, number: int) -> Window | None:
        if ahead.error is not None:
            raise ahead.error
        if not self._has_length and ahead.present is not None:
            collectives.refuse_some(int(ahead.present), number)
        return ahead.window

    def stream_windows(self, own: Iterator[Window], data: StreamPosition) -> Iterator[Window]:
        """Yields the windows of virtual streams until the last rank has no further row, as `windows` does.

        See `stream_windows.agreed_windows`.

        Args:
            own: the windows of this process, which go on with padding after its last row.
            data: the training data, whose position moves past windows that are not yielded.
        """
        self._source, self._ahead = None, None
        for window in agreed_windows(own, data, self.sum_of_rows):
            if self._counts_differ:
                self._add_counts(window)
            yield window

    def sum_of_rows(self, count: int) -> int:
        """Returns the sum of a number of rows over all data-parallel ranks. Collective: every process must call it.

        Args:
            count: the number of this process, which the other ranks of its replica, with the same rows, have too.
        """
        return int(collectives.all_sum(float(count) if self._contributes_counts else 0.0))

    def _add_counts(self, window: Window) -> None:
        counts = self._strategy.reduce(self._on_device(_counts(window)))
        window.counts = AsyncHostCopy(counts)
        if host_can_read(self._device):
            window.num_valid = counts[0].item()
            self.set_host_counts(window)
        else:
            window.num_valid = counts[0]

    def _on_device(self, values: Sequence[float | Tensor]) -> Tensor:
        """Returns numbers, of which some may be scalar tensors, as one tensor on the device."""
        # float64 adds counts exactly up to 2**53.
        if host_can_read(self._device):
            return torch.tensor([float(value) for value in values], dtype=torch.float64)
        numbers = torch.tensor([0.0 if isinstance(one, Tensor) else one for one in values], dtype=torch.float64)
        if self._device.type != "cpu":
            # Pinned: a copy from pageable memory would synchronize with the device.
            numbers = numbers.pin_memory().to(self._device, non_blocking=True)
        for place, value in enumerate(values):
            # Copied on the device, which does not wait for it.
            if isinstance(value, Tensor):
                numbers[place] = value.detach()
        return numbers

    def set_host_counts(self, window: Window) -> None:
        """Sets the numbers of tokens and rows of a window to the sums over all data-parallel ranks.

        A window is the micro-batches of one optimizer step.
        """
        if window.counts is not None:
            _set_counts(window, window.counts.read().tolist())
            window.counts = None

    def step(
        self, share: Tensor, squares: Tensor | None = None, *, looks_ahead: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the loss and the squared norm, summed over all processes, and exchanges stop requests.

        Collective: every process must call it.

        Args:
            share: the part of the loss that this process computed.
            squares: what this process adds to the square of the gradient norm; None if the norm is measured elsewhere.
            looks_ahead: whether to read the next window and sum its counts. It must be equal on every process.

        Shapes:
            share, squares: scalar tensors. Returns scalar tensors.
        """
        if not self.several:
            loss: Tensor = self._strategy.reduce(share)
            return loss, squares
        if looks_ahead and self._source is not None:
            self._ahead = self._read_ahead(self._source)
        window = self._ahead.window if self._ahead is not None else None
        counts = _NO_COUNTS if window is None or not self._contributes_counts else _counts(window)
        save, status = self.save_status()
        shares = (share if self._contributes else 0.0, 0.0 if squares is None else squares)
        sums = self._on_device((*counts, self._code, float(window is not None), status, *shares))
        dist.all_reduce(sums)
        self._receive(sums, save)
        # The ranks of early stages do not know in which dtype the loss was computed.
        kind = share.dtype if self._strategy.layout.pipeline_parallel_size == 1 else torch.float64
        return sums[-2].to(kind), None if squares is None else sums[-1]

    def _receive(self, sums: Tensor, save: Any) -> None:
        """Takes counts and stop requests from the sums: at once if the host can read them, else one step later.

        Args:
            sums: the sums of this step.
            save: the background save whose states are in the sums; None if there is none.

        Shapes:
            sums: (10,).
        """
        ahead = self._ahead
        window = ahead.window if ahead is not None and self._counts_differ else None
        if host_can_read(self._device):
            known = _StepSums(*sums.tolist())
            self._take(known, save)
            if ahead is not None:
                ahead.present = known.present
            if window is not None:
                window.num_valid = known.valid
                _set_counts(window, known)
            return
        if self._sums is not None:
            # Of the step before: the device has finished it when it computes this one.
            self._take(_StepSums(*self._sums.read().tolist()), self._save_of_sums)
        self._sums, self._save_of_sums = AsyncHostCopy(sums), save
        if window is not None:
            window.num_valid, window.counts = sums[0], self._sums

    def _take(self, known: _StepSums, save: Any) -> None:
        self._record_stop(known.stop)
        self.saves = save, known.save

    @staticmethod
    def _read_ahead(source: Iterator[Window]) -> _Ahead:
        try:
            return _Ahead(next(source, None))
        except Exception as error:  # noqa: BLE001 - it is raised again when the window is asked for
            return _Ahead(error=error)

    def control(self, control: TrainerControl, dispatcher: CallbackDispatcher) -> None:
        """Broadcasts the control flags of the main process if callbacks of the user may have set different flags.

        Callbacks of Forgather and transformers set flags by values that are equal on all processes. A user's callback
        may, for example, read a clock. Collective: every process must call it.

        Args:
            control: the control flags, which are changed.
            dispatcher: the dispatcher to the callbacks of the run.
        """
        # Only with callbacks of the user: otherwise every step would need one more collective.
        if self.several and dispatcher.has_foreign:
            agreed = collectives.broadcast_from_main([getattr(control, name) for name in _SWITCHES])
            for name, value in zip(_SWITCHES, agreed, strict=True):
                setattr(control, name, value)

    def _start_stop_sum(self) -> None:
        self._stop_sum = collectives.AsyncSum(self._code)

    @property
    def _code(self) -> float:
        return self.interrupt.stop_code + (REQUEST_CODE if self.has_requests() else 0.0)

    def _record_stop(self, stop_codes: float) -> None:
        self._stop = self._stop or self.interrupt.error_for(stop_codes)
        self._are_requests_known |= stop_codes == REQUEST_CODE

    def take_requests(self) -> bool:
        """Returns whether control requests are to be taken from the main process; the same on every process."""
        if not self.several:
            return self.has_requests()
        # Reads the sum of this step, if it is still being computed.
        self.stop_error()
        are_known, self._are_requests_known = self._are_requests_known, False
        return are_known

    def stop_all(self) -> None:
        """Records a request to stop. Every process must call it at the same step boundary."""
        self._stop = self.interrupt.request()

    def stop_error(self) -> KeyboardInterrupt | None:
        """Returns the error to raise if a process was asked to stop, otherwise None; the same on every process."""
        if not self.several:
            return self.interrupt.error if self.interrupt.requested else None
        if self._stop_sum is not None:
            self._record_stop(self._stop_sum.read())
            self._stop_sum = None
        return self._stop

    def exchange_stop(self) -> KeyboardInterrupt | None:
        """Exchanges stop requests again, for example after a long operation, and returns the result of `stop_error`.

        Collective: every process must call it.
        """
        if self.several and self.stop_error() is None:
            self._start_stop_sum()
        return self.stop_error()

    def wants_end(self) -> bool:
        """Returns whether to interrupt a long operation; the same on every process. Collective.

        Each call starts an exchange of stop requests without waiting for it, and returns the result of the exchange
        that the previous call started.
        """
        wants = self.stop_error() is not None
        if self.several and not wants:
            self._start_stop_sum()
        return wants


def _no_save() -> tuple[Any, float]:
    return None, 0.0


_SWITCHES = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


_NO_COUNTS = (0, 0, 0, 0, 0)


def _counts(window: Window) -> tuple[float | Tensor, ...]:
    return window.num_valid, window.num_tokens, window.num_rows, window.num_unpadded, window.num_pairs


def _set_counts(window: Window, sums: Sequence[float]) -> None:
    """Sets the counts of a window that the host needs to sums, in the order of `_counts`."""
    window.num_tokens, window.num_rows, window.num_unpadded, window.num_pairs = map(int, sums[1:5])
