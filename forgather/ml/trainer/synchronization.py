"""What all processes of a run know of a step: its targets, its loss, and whether somebody wants to stop.

Takes this process's windows and its share of the loss; gives those of all. Keeps true: one process sends nothing and
changes nothing; with several there are two sums a step, of the counts and of the loss; on an accelerator the host waits
for neither: it reads the counts at the end of their step. The wish to stop rides on the sum of the loss where the host
computes it, and goes from host to host beside it elsewhere: whoever wishes before his own loss is computed is heard at
the end of this step, whoever wishes later at the end of the next, or of what takes long between them.
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
    """The sums of a run.

    Args:
        strategy: adds up.
        interrupt: tells whether this process was asked to stop.
    """

    def __init__(self, strategy: Strategy, interrupt: Interrupt) -> None:
        topology = strategy.topology
        self.several = topology.world_size > 1
        self._strategy = strategy
        self.interrupt = interrupt
        self._device = topology.device
        self._counts_differ = topology.dp_size > 1
        # Only where every process has a share of its own does the sum of losses hear everybody, and only that of the
        # host can be read without waiting.
        self._rides = topology.dp_size == topology.world_size and topology.device.type == "cpu"
        self._counts: AsyncHostCopy | None = None
        self._wishes: collectives.Total | None = None
        self._stop: KeyboardInterrupt | None = None

    def windows(self, own: Iterator[Window], *, has_length: bool) -> Iterator[Window]:
        """Yields this process's windows with the counts of all; on an accelerator `settle` brings those of the host.

        Raises:
            DistributedError: FG855 for data without a length that ends at different places.
        """
        for window in own if has_length else collectives.in_step(own):
            if self._counts_differ:
                self._add_counts(window)
            yield window

    def _add_counts(self, window: Window) -> None:
        valid = window.num_valid
        known = 0.0 if isinstance(valid, Tensor) else float(valid)
        counts = torch.tensor([known, window.num_tokens, window.num_rows], dtype=torch.float64)
        if self._device.type != "cpu":
            counts = counts.pin_memory().to(self._device, non_blocking=True)
        if isinstance(valid, Tensor):
            counts[0] = valid
        counts = self._strategy.reduce(counts)
        self._counts = AsyncHostCopy(counts)
        if self._device.type == "cpu":
            window.num_valid = counts[0].item()
            self.settle(window)
        else:
            window.num_valid = counts[0]

    def settle(self, window: Window) -> None:
        """Gives a window the tokens and rows of all processes."""
        if self._counts is not None:
            _, window.num_tokens, window.num_rows = map(int, self._counts.read().tolist())
            self._counts = None

    def loss(self, share: Tensor) -> Tensor:
        """Returns the loss of all processes; what somebody wishes is sent along."""
        if not self.several:
            loss: Tensor = self._strategy.reduce(share)
            return loss
        if self._rides:
            sums = self._strategy.reduce(torch.stack([share, torch.full_like(share, self.interrupt.wish)]))
            self._hear(sums[1].item())
            return sums[0]  # type: ignore[no-any-return]
        self._send()
        loss = self._strategy.reduce(share)
        return loss

    def control(self, control: TrainerControl, callbacks: Sequence[TrainerCallback]) -> None:
        """Sets the switches as they are on the process that writes, where callbacks may have set them apart.

        Those of Forgather and of transformers decide from what is the same everywhere; one of the user may look at a
        clock.
        """
        if self.several and any(_is_foreign(callback) for callback in callbacks):
            agreed = collectives.broadcast_from_main([getattr(control, name) for name in _SWITCHES])
            for name, value in zip(_SWITCHES, agreed, strict=True):
                setattr(control, name, value)

    def _send(self) -> None:
        self._wishes = collectives.Total(self.interrupt.wish)

    def _hear(self, wishes: float) -> None:
        self._stop = self._stop or self.interrupt.told(wishes)

    def stop(self) -> KeyboardInterrupt | None:
        """Returns what to raise where a process was asked to stop; None elsewhere. It is the same on every process."""
        if not self.several:
            return self.interrupt.error if self.interrupt.requested else None
        if self._wishes is not None:
            self._hear(self._wishes.read())
            self._wishes = None
        return self._stop

    def ask(self) -> KeyboardInterrupt | None:
        """Returns the same after something that took long: wishes of that time are heard now."""
        if self.several and self.stop() is None:
            self._send()
        return self.stop()

    def wants_end(self) -> bool:
        """Tells, on every process alike, whether to break off what takes long.

        Called again and again it waits for nobody: it tells what was wished until it was called the last time.
        """
        wants = self.stop() is not None
        if self.several and not wants:
            self._send()
        return wants


_SWITCHES = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


def _is_foreign(callback: TrainerCallback) -> bool:
    return type(callback).__module__.partition(".")[0] not in ("forgather", "transformers")
