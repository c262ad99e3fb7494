"""Host memory that holds the tensors of a snapshot while the run goes on.

Takes a `Snapshot` whose tensors belong to the run; gives one whose tensors do not. Keeps true: the memory is the same
from save to save, pinned where the tensors come from CUDA; who asks for a second copy must be done with the first.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from forgather.ml.trainer.snapshot import Snapshot


class Staging:
    """Buffers by file and key."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Returns the snapshot with tensors of its own, on the host; it waits until they are there."""
        held = {(file, key): tensor for file, tensors in snapshot.tensors.items() for key, tensor in tensors.items()}
        self._buffers = {place: self._filled(place, tensor) for place, tensor in held.items()}
        for device in {tensor.device for tensor in held.values() if tensor.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in snapshot.tensors}
        for (file, key), buffer in self._buffers.items():
            copies[file][key] = buffer
        return dataclasses.replace(snapshot, tensors=copies)

    def _filled(self, place: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return buffer.copy_(tensor.detach(), non_blocking=True)
