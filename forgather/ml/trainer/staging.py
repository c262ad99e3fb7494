"""Copies of snapshots in host memory, from which a background thread writes a checkpoint while training goes on.

`Staging.copy` takes a snapshot and returns one in host memory. From an accelerator, all tensors go into one page-locked
buffer on a side stream. The stream of the model waits for these copies, so the next update cannot change what is being
copied; the host does not wait. `Staging.wait` does, in the thread that writes. No GPU has run this way: its order of
calls is tested with recorded streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.ml.trainer.snapshot import Snapshot

_Place = tuple[str, str]
_ALIGNMENT = 64
"""The bytes to which tensors are aligned in the buffer: more than the size of one element of any type."""


class Staging:
    """Host memory buffers into which snapshots are copied; later snapshots reuse the buffers.

    Args:
        streams: the module that has `Stream` and `accelerator.current_stream`, as torch does.
        host_types: the types of devices whose tensors are copied at once, without a stream.
    """

    def __init__(self, *, streams: Any = torch, host_types: Collection[str] = ("cpu",)) -> None:
        self._streams = streams
        self._host_types = host_types
        self._buffers: dict[_Place, Tensor] = {}
        self._locked = torch.empty(0, dtype=torch.uint8)
        self._sides: dict[torch.device, Any] = {}
        self._events: list[Any] = []

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Returns the snapshot with all its tensors in host memory. Those of an accelerator have values after `wait`.

        Units:
            Host memory: the bytes of all tensors of the snapshot, which stay allocated until the next call.
        """
        held = {(file, key): tensor for file, tensors in snapshot.tensors.items() for key, tensor in tensors.items()}
        away = {place: tensor for place, tensor in held.items() if tensor.device.type not in self._host_types}
        self._buffers = {place: self._filled(place, tensor) for place, tensor in held.items() if place not in away}
        found = self._buffers | self._copied_beside(away)
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in snapshot.tensors}
        for file, key in held:
            copies[file][key] = found[file, key]
        return dataclasses.replace(snapshot, tensors=copies)

    def wait(self) -> None:
        """Waits until the copies of the last snapshot are complete."""
        for event in self._events:
            event.synchronize()
        self._events.clear()

    def _filled(self, place: _Place, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return buffer.copy_(tensor.detach())

    def _copied_beside(self, held: Mapping[_Place, Tensor]) -> dict[_Place, Tensor]:
        """Starts to copy tensors of accelerators, and returns their places in the page-locked buffer."""
        found = self._places(held)
        for device in dict.fromkeys(tensor.device for tensor in held.values()):
            current = self._streams.accelerator.current_stream(device)
            side = self._sides.get(device) or self._sides.setdefault(device, self._streams.Stream(device))
            # The values must be there before they are copied.
            side.wait_stream(current)
            with side:
                for place, tensor in held.items():
                    if tensor.device == device:
                        found[place].copy_(tensor.detach(), non_blocking=True)
                        # Memory of a tensor that is freed meanwhile must not be used before it is copied.
                        tensor.record_stream(side)
                done = side.record_event()
            # Training changes weights and states in place.
            current.wait_event(done)
            self._events.append(done)
        return found

    def _places(self, held: Mapping[_Place, Tensor]) -> dict[_Place, Tensor]:
        offsets, end = {}, 0
        for place, tensor in held.items():
            offsets[place] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Kept between saves: allocating page-locked memory takes longer than filling it.
        if self._locked.numel() < end:
            self._locked = torch.empty(0, dtype=torch.uint8)
            self._locked = torch.empty(end, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return {
            place: self._locked[offsets[place] : offsets[place] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for place, tensor in held.items()
        }
