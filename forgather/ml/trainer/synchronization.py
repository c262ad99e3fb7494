"""Values that all processes of a run must agree on in each step: target counts, the loss, control flags, stop requests.

Takes this process's windows and its part of the loss; gives the sums over all processes. A single process communicates
nothing. Several processes need two all-reduces per step, one for counts and one for the loss. On an accelerator the
host waits for neither: it reads the counts at the end of the step. On the CPU a stop request is sent with the sum of
the loss; elsewhere it has an all-reduce of its own between hosts. A request that arrives before this process's loss is
computed stops the run at the end of this step; a later one, at the end of the next step, or of an evaluation or save
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forgather.interrupt import Interrupt
from forgather.ml.callbacks.base import TrainerCallback, TrainerControl
from forgather.ml.distributed import collectives
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.meter import AsyncHostCopy
from forgather.ml.types import Window


class RunSync:
    """The collectives of a run that are not part of the strategy.

    Args:
        strategy: reduces tensors over its processes.
        interrupt: holds whether this process was asked to stop.
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

    def windows(self, own: Iterator[Window], *, has_length: bool) -> Iterator[Window]:
        """Yields this process's windows with the counts of all processes.

        On an accelerator the target count stays on the device; `set_host_counts` sets the host counts later.

        Args:
            own: windows of this process.
            has_length: the number of windows is the same on all processes.

        Raises:
            DistributedError: FG855 for data without a length that ends at different places.
        """
        for window in own if has_length else collectives.iterate_in_step(own):
            if self._counts_differ:
                self._add_counts(window)
            yield window

    def _add_counts(self, window: Window) -> None:
        valid = window.num_valid
        known = 0.0 if isinstance(valid, Tensor) else float(valid)
        # float64 adds counts exactly up to 2**53.
        counts = torch.tensor([known, window.num_tokens, window.num_rows], dtype=torch.float64)
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
        """Sets the tokens and rows of a window to those of all processes."""
        if self._counts is not None:
            _, window.num_tokens, window.num_rows = map(int, self._counts.read().tolist())
            self._counts = None

    def loss(self, share: Tensor) -> Tensor:
        """Returns the loss summed over all processes, and exchanges stop requests.

        Shapes:
            share: scalar, this process's part of the loss. Returns a scalar.
        """
        if not self.several:
            loss: Tensor = self._strategy.reduce(share)
            return loss
        if self._stop_with_loss:
            # One all-reduce for both: on the CPU a second one would cost each step a round trip.
            sums = self._strategy.reduce(torch.stack([share, torch.full_like(share, self.interrupt.stop_code)]))
            self._record_stop(sums[1].item())
            return sums[0]  # type: ignore[no-any-return]
        # Started before the reduction of the loss, and read at the end of the step: the host waits for neither.
        self._start_stop_sum()
        loss = self._strategy.reduce(share)
        return loss

    def control(self, control: TrainerControl, callbacks: Sequence[TrainerCallback]) -> None:
        """Sets the control flags to those of the main process if callbacks may have set them differently. Collective.

        Callbacks of Forgather and transformers decide by values that are equal on all processes; a user's callback may,
        for example, look at a clock.

        Args:
            control: is changed.
            callbacks: of the run.
        """
        # Only with callbacks of the user: otherwise every step would need one more collective.
        if self.several and any(_is_foreign(callback) for callback in callbacks):
            agreed = collectives.broadcast_from_main([getattr(control, name) for name in _SWITCHES])
            for name, value in zip(_SWITCHES, agreed, strict=True):
                setattr(control, name, value)

    def _start_stop_sum(self) -> None:
        self._stop_sum = collectives.AsyncSum(self.interrupt.stop_code)

    def _record_stop(self, stop_codes: float) -> None:
        self._stop = self._stop or self.interrupt.error_for(stop_codes)

    def stop_error(self) -> KeyboardInterrupt | None:
        """Returns the error to raise if a process was asked to stop, on every process alike; else None."""
        if not self.several:
            return self.interrupt.error if self.interrupt.requested else None
        if self._stop_sum is not None:
            self._record_stop(self._stop_sum.read())
            self._stop_sum = None
        return self._stop

    def exchange_stop(self) -> KeyboardInterrupt | None:
        """Returns the same as `stop_error`, including requests that came during a long operation. Collective."""
        if self.several and self.stop_error() is None:
            self._start_stop_sum()
        return self.stop_error()

    def wants_end(self) -> bool:
        """Returns, equally on every process, whether to interrupt a long operation. Collective.

        Repeated calls do not wait: each one returns the requests that were known at the call before.
        """
        wants = self.stop_error() is not None
        if self.several and not wants:
            self._start_stop_sum()
        return wants


_SWITCHES = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


def _is_foreign(callback: TrainerCallback) -> bool:
    return type(callback).__module__.partition(".")[0] not in ("forgather", "transformers")
