"""The largest tensors at an out-of-memory error, as a note of the error.

The note is added before the process leaves the failing code, while the tensors are still alive. The launcher adds the
largest row of the plan to the same error.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.memory import local_tensor
from forgather.ml.number_format import format_bytes

_SHOWN = 3


def note_largest_tensors(error: BaseException, model: nn.Module, optimizer: Any) -> None:
    """Adds a note to an out-of-memory error: the largest tensors that are alive, with their names.

    Args:
        error: the error.
        model: the model, whose weights and gradients are named.
        optimizer: the optimizer, whose state is named, or None.
    """
    names = dict(_named(model, optimizer))
    found: dict[int, tuple[int, str]] = {}
    for thing in gc.get_objects():
        # Not `isinstance`, which asks objects for their class: a lazy module would import something now.
        if not issubclass(type(thing), Tensor):
            continue
        tensor = local_tensor(thing)
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        size, pointer = storage.nbytes(), storage.data_ptr()
        text = names.get(pointer) or f"a tensor of shape {list(tensor.shape)} and {str(tensor.dtype)[6:]}"
        if pointer not in found or pointer in names:
            found[pointer] = (size, text)
    largest = sorted(found.values(), reverse=True)[:_SHOWN]
    if largest:
        shown = ", ".join(f"{text} ({format_bytes(size)})" for size, text in largest)
        error.add_note(f"the largest tensors at the error: {shown}")
    if (block := _largest_block()) is not None:
        error.add_note(block)


def _named(model: nn.Module, optimizer: Any) -> Iterator[tuple[int, str]]:
    states = getattr(optimizer, "state", {})
    for name, parameter in model.named_parameters():
        parts = {name: parameter, f"the gradient of {name}": parameter.grad}
        parts |= {f"{part} of {name}": value for part, value in states.get(parameter, {}).items()}
        for text, value in parts.items():
            local = local_tensor(value) if isinstance(value, Tensor) else None
            if local is not None:
                yield local.untyped_storage().data_ptr(), text


def _largest_block() -> str | None:
    """Returns a sentence about the largest allocation on CUDA, with its line if `MemoryProfiler` records them."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    blocks = [block for segment in segments for block in segment["blocks"]]
    alive = [block for block in blocks if block["state"] == "active_allocated"]
    if not alive:
        return None
    block = max(alive, key=lambda block: block["size"])
    frames = [frame for frame in block.get("frames", ()) if not frame["filename"].startswith("??")]
    line = next((f", made at {frame['filename']}:{frame['line']}" for frame in frames), "")
    return f"the largest allocation on the GPU is {format_bytes(block['size'])}{line}"
