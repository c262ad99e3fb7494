"""The layers of a model on several devices of one process.

The input is a model and devices; the output is the same model, whose layers are moved to the devices in their order by
Accelerate, which also moves activations between them. One device computes at a time, so this saves memory, not time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import dispatch_model
from torch import nn

from forgather.errors import TrainingError
from forgather.value_text import shown


def place_layers(model: nn.Module, devices: Sequence[int | str]) -> nn.Module:
    """Moves the layers of a model to devices, in their order and in parts of similar size, and returns the model.

    Args:
        model: the model, with its weights on the host.
        devices: the devices, as numbers of accelerators or names of torch.

    Raises:
        TrainingError: FG811 if a device does not exist, or if the CPU is one of several devices.
    """
    chosen = [_device(device) for device in devices]
    if not chosen:
        raise _unusable("devices is empty", "give at least one, as devices=[0, 1]")
    if len(set(chosen)) > 1 and torch.device("cpu") in chosen:
        raise _unusable(
            "the CPU is next to accelerators in devices: Accelerate would keep weights there without computing there",
            "give accelerators only, or the CPU only",
        )
    placed: nn.Module = dispatch_model(model, device_map=device_map(model, chosen), main_device=chosen[0])
    return placed


def device_map(model: nn.Module, devices: Sequence[torch.device]) -> dict[str, Any]:
    """Returns the device of each part of a model, by the name of the part.

    Args:
        model: the model.
        devices: the devices, in the order of the layers.

    Units:
        Parts are cut by the bytes of their weights.
    """
    if len(set(devices)) == 1:
        return {"": devices[0]}
    parts = [(name, _bytes(part)) for name, part in _parts(model)]
    total, before = sum(size for _, size in parts) or 1, 0
    places: dict[str, Any] = {}
    for name, size in parts:
        # The middle of a part decides, so that parts of similar size are counted alike.
        places[name] = devices[min(len(devices) - 1, int((before + size / 2) * len(devices) / total))]
        before += size
    return places


def _parts(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Yields the parts that must stay whole: each layer of a list, and what is next to lists."""
    for name, own in model.named_parameters(recurse=False):
        yield prefix + name, own
    for name, buffer in model.named_buffers(recurse=False):
        yield prefix + name, nn.Parameter(buffer, requires_grad=False)
    for name, child in model.named_children():
        holds_list = any(isinstance(one, nn.ModuleList | nn.Sequential) for one in child.modules())
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from ((f"{prefix}{name}.{number}", layer) for number, layer in child.named_children())
        elif holds_list:
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _bytes(part: nn.Module | nn.Parameter) -> int:
    weights: Mapping[str, Any] = {"": part} if isinstance(part, nn.Parameter) else dict(part.named_parameters())
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def _device(device: int | str) -> torch.device:
    available = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    kind = torch.accelerator.current_accelerator() if available else None
    if isinstance(device, int) and not isinstance(device, bool) and 0 <= device < 1024:
        found = torch.device(kind.type if kind is not None else "cuda", device)
    else:
        try:
            found = torch.device(device if isinstance(device, str) else shown(device))
        except (RuntimeError, ValueError):
            raise _unusable(
                f"devices has {shown(device)}", "give numbers of accelerators, or names such as 'cpu'"
            ) from None
    if found.type != "cpu" and (found.index or 0) >= available:
        has = f"this machine has {available} accelerators" if available else "this machine has no accelerator"
        raise _unusable(f"devices has {shown(device)}, and {has}", "give devices=['cpu'], or devices that exist")
    return found


def _unusable(message: str, hint: str) -> TrainingError:
    return TrainingError(message, code="FG811", hint=hint).about("devices")
