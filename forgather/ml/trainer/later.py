"""Numbers on their way from a device to the host.

Takes a tensor; gives its numbers when they are asked for. Keeps true: the copy begins at once and waits for nothing
that is queued afterwards, so whoever asks a step later finds it there.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Later:
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
