"""Activations that a traced step moves to the memory of the host, as the run does on a GPU.

Tensors of a trace are on the CPU, where nothing is moved. Within `HostActivations`, a CPU is treated as a device; the
copies are marked as memory of the host, and counted as messages between the two.

Units:
    bytes.
"""

from __future__ import annotations

from contextvars import Token
from typing import Any

import torch
from torch import Tensor

from forgather.ml.activation_offloading import IN_FLIGHT, host_memory
from forgather.ml.planner.rank_recorder import ACTIVATIONS, RankRecorder
from forgather.planner.work import TO_DEVICE, TO_HOST, Message

ON_THE_WAY = "activations on their way to the host"


class HostActivations:
    """Context manager in which activations are moved.

    Args:
        recorder: the recorder of the step.
        device_type: the kind of device that is planned for. Nothing changes for "cpu".
    """

    def __init__(self, recorder: RankRecorder, device_type: str) -> None:
        self._recorder = recorder
        self._is_active = device_type != "cpu"
        self._sizes: list[int] = []
        self._token: Token[Any] | None = None

    def __enter__(self) -> HostActivations:
        self._token = host_memory.set(self._allocated) if self._is_active else None
        return self

    def __exit__(self, *error: Any) -> None:
        if self._token is not None:
            host_memory.reset(self._token)

    def untraced(self) -> dict[str, int]:
        """Returns the memory of a device from which copies are on their way, which a trace moves at once."""
        sizes = self._sizes
        largest = max((sum(sizes[place : place + IN_FLIGHT]) for place in range(len(sizes))), default=0)
        return {ON_THE_WAY: largest} if largest else {}

    def _allocated(self, count: int, dtype: torch.dtype) -> Tensor:
        host = torch.empty(count, dtype=dtype, device="cpu")
        for allocation in self._recorder.found([host]):
            allocation.on_host, allocation.category = True, ACTIVATIONS
        num_bytes = count * dtype.itemsize
        self._sizes.append(num_bytes)
        for phase, name in (("forward", TO_HOST), ("backward", TO_DEVICE)):
            self._recorder.work.count_message(Message(phase, name, num_bytes, 1))
        return host
