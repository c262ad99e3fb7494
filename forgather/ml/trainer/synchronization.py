"""Synchronizes values between the processes of a run in each step: target counts, loss, control flags, stop requests.

With a single process there is no communication. With several processes each step needs two all-reduces, one for the
counts and one for the loss. On an accelerator the host waits for neither of them, and reads the counts at the end of
the step. If training runs on the CPU and every process is a data-parallel rank, stop requests are sent with the sum of
the loss; otherwise they have a separate all-reduce between hosts. A stop request that a process receives before it has
computed its loss stops the run at the end of the same step. A later request stops the run at the end of the next step,
or after an evaluation or save before that. The same sum tells all processes that the main process has control requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from forgather.interrupt import REQUEST_CODE, Interrupt
from forgather.ml.callbacks.base import TrainerCallback, TrainerControl
from forgather.ml.distributed import collectives
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.bad_rows import BadRows
from forgather.ml.trainer.meter import AsyncHostCopy
from forgather.ml.types import Window


class StreamPosition(Protocol):
    """What `RunSync.stream_windows` needs of the training data."""

    @property
    def drops_last(self) -> bool:
        """Whether an epoch ends before the first window that is not full."""

    @property
    def bad_rows(self) -> BadRows:
        """The object that counts rows that are left out."""

    def advance(self, window: Window) -> None:
        """Moves the position past the rows of a window."""


class RunSync:
    """The collectives of a run that are not part of the strategy.

    Args:
        strategy: the strategy, whose `reduce` sums tensors over processes.
        interrupt: the record of whether this process was asked to stop.
    """

    def __init__(self, strategy: Strategy, interrupt: Interrupt) -> None:
        topology = strategy.topology
        self.several = topology.world_size > 1
        self._strategy = strategy
        self.interrupt = interrupt
        self._device = topology.device
        self._counts_differ = topology.dp_size > 1
        # The sum of losses reaches every process only if each of them is a data-parallel rank, and only on the CPU can
        # it be read without waiting.
        self._stop_with_loss = topology.dp_size == topology.world_size and topology.device.type == "cpu"
        self._counts: AsyncHostCopy | None = None
        self._stop_sum: collectives.AsyncSum | None = None
        self._stop: KeyboardInterrupt | None = None
        self.has_requests: Callable[[], bool] = bool
        """A function that returns whether control requests wait in this process; only the main process has any."""
        self._are_requests_known = False

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
        for window in own if has_length else collectives.iterate_in_step(own):
            if self._counts_differ:
                self._add_counts(window)
            yield window

    def stream_windows(self, own: Iterator[Window], data: StreamPosition) -> Iterator[Window]:
        """Yields the windows of virtual streams until the last rank has no further row, as `windows` does.

        A window without a row on any rank is passed over. Such windows are at the end of an epoch, where streams have
        ended. One exchange between hosts for each window.

        Args:
            own: the windows of this process, which go on with padding after its last row.
            data: the training data, whose position moves past windows that are not yielded.

        Raises:
            TrainingError: FG958, on every process, if more rows were left out than may be.
        """
        for window in own:
            found = 2.0 if window.num_rows else 0.0 if window.is_last else 1.0
            if data.drops_last:
                # All of them must have full windows: the least one decides.
                found = 0.0 if collectives.all_max(0.0 if window.is_full else 1.0) else found
            found = collectives.all_max(found)
            if data.bad_rows.limit is not None:
                data.bad_rows.refuse_more(int(collectives.all_sum(float(data.bad_rows.count))))
            if not found:
                return
            if found < 2:
                data.advance(window)
                continue
            if self._counts_differ:
                self._add_counts(window)
            yield window

    def _add_counts(self, window: Window) -> None:
        valid = window.num_valid
        known = 0.0 if isinstance(valid, Tensor) else float(valid)
        # float64 adds counts exactly up to 2**53.
        sizes = (window.num_tokens, window.num_rows, window.num_unpadded)
        counts = torch.tensor([known, *sizes], dtype=torch.float64)
        if self._device.type != "cpu":
            # Pinned: a copy from pageable memory would synchronize with the device.
            counts = counts.pin_memory().to(self._device, non_blocking=True)
        # A loss rule may count targets on the device; copying that count here does not wait for it.
        if isinstance(valid, Tensor):
            counts[0] = valid
        counts = self._strategy.reduce(counts)
        self._counts = AsyncHostCopy(counts)
        if self._device.type == "cpu":
            window.num_valid = counts[0].item()
            self.set_host_counts(window)
        else:
            window.num_valid = counts[0]

    def set_host_counts(self, window: Window) -> None:
        """Sets the numbers of tokens and rows of a window to the sums over all data-parallel ranks.

        A window is the micro-batches of one optimizer step.
        """
        if self._counts is not None:
            _, window.num_tokens, window.num_rows, window.num_unpadded = map(int, self._counts.read().tolist())
            self._counts = None

    def loss(self, share: Tensor) -> Tensor:
        """Returns the loss summed over all processes, and exchanges stop requests.

        Collective: every process must call it.

        Args:
            share: the part of the loss that this process computed.

        Shapes:
            share: a scalar tensor. Returns a scalar tensor.
        """
        if not self.several:
            loss: Tensor = self._strategy.reduce(share)
            return loss
        if self._stop_with_loss:
            # One all-reduce for both: on the CPU a second one would cost each step a round trip.
            sums = self._strategy.reduce(torch.stack([share, torch.full_like(share, self._code)]))
            self._record_stop(sums[1].item())
            return sums[0]  # type: ignore[no-any-return]
        # Started before the reduction of the loss, and read at the end of the step: the host waits for neither.
        self._start_stop_sum()
        loss = self._strategy.reduce(share)
        return loss

    def control(self, control: TrainerControl, callbacks: Sequence[TrainerCallback]) -> None:
        """Broadcasts the control flags of the main process if callbacks of the user may have set different flags.

        Callbacks of Forgather and transformers set flags by values that are equal on all processes. A user's callback
        may, for example, read a clock. Collective: every process must call it.

        Args:
            control: the control flags, which are changed.
            callbacks: the callbacks of the run.
        """
        # Only with callbacks of the user: otherwise every step would need one more collective.
        if self.several and any(_is_foreign(callback) for callback in callbacks):
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


_SWITCHES = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


def _is_foreign(callback: TrainerCallback) -> bool:
    return type(callback).__module__.partition(".")[0] not in ("forgather", "transformers")
