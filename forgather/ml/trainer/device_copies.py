"""Copies of the next step's batches to an accelerator, on a stream beside that of the model.

Takes the windows of an epoch on the host; gives the same windows with their tensors on the device. While the device
computes a step, the batches of the next one are read and copied, so that no step begins with a copy. On the CPU, and
where reading ahead would change what is read (streams, and rows that this process itself reads), windows pass as they
are. No GPU has run this module: its order of calls is tested with recorded streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forgather.ml.strategy.model_strategy import to_device
from forgather.ml.types import PaddingBatch, Window


def copied_ahead(windows: Iterator[Window], device: torch.device, *, streams: Any = torch) -> Iterator[Window]:
    """Yields the windows with their batches on the device; the next one is read and copied before one is yielded.

    Args:
        windows: the windows of an epoch. Reading one must not depend on the training step before it.
        device: an accelerator.
        streams: the module that has `Stream` and `accelerator.current_stream`, as torch does.
    """
    side = streams.Stream(device)
    ready: tuple[Window, Any] | None = None
    for window in windows:
        with side:
            moved = replace(window, batches=to_device(window.batches, device))
            done = side.record_event()
        if ready is not None:
            yield _taken(*ready, streams.accelerator.current_stream(device))
        ready = moved, done
    if ready is not None:
        yield _taken(*ready, streams.accelerator.current_stream(device))


def _taken(window: Window, done: Any, stream: Any) -> Window:
    """Lets the model's stream wait for the copies, and keeps their memory until that stream has used it."""
    # An order between two streams: the host does not wait.
    stream.wait_event(done)
    for tensor in _tensors(window.batches):
        # The memory belongs to the side stream, which would give it to the next copy while the model still reads it.
        tensor.record_stream(stream)
    return window


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _tensors(item)
    elif isinstance(batch, tuple | list):
        for item in batch:
            yield from _tensors(item)
    elif isinstance(batch, PaddingBatch):
        yield from _tensors(batch.batch)
