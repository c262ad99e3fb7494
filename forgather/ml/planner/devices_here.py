"""The GPUs of this machine: their facts, and how much of their memory is taken.

`device_here` gives a `forgather.planner.hardware.Hardware` with the memory that was found, and the bytes that are held;
None without a GPU. Nothing is allocated on a device if `pynvml` is installed. Without it, torch asks the driver, which
makes a context on the device.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import torch

from forgather.planner.hardware import Hardware, hardware_of_device


def device_here(num_devices: int) -> tuple[Hardware, int] | None:
    """Returns the GPU of this machine with the least free memory, and what is held on it in bytes; None without a GPU.

    What is held includes what this process has allocated there.

    Args:
        num_devices: how many devices of the machine a run would use. Devices beyond those that exist are left out.
    """
    if not torch.cuda.is_available():
        return None
    found = []
    for index in range(max(1, min(num_devices, torch.cuda.device_count()))):
        facts = torch.cuda.get_device_properties(index)
        kind = "rocm" if torch.version.hip else "cuda"
        known = hardware_of_device(facts.name) or Hardware(name=facts.name, title=facts.name, kind=kind)
        held = _held_bytes(index, facts.total_memory)
        found.append((replace(known, memory_bytes=facts.total_memory), held))
    return min(found, key=lambda item: (item[0].memory_bytes or 0) - item[1])


def _held_bytes(index: int, total_bytes: int) -> int:
    if find_spec("pynvml") is not None:
        with contextlib.suppress(RuntimeError, import_module("pynvml").NVMLError):
            return min(total_bytes, int(torch.cuda.device_memory_used(index)))
    free, _ = torch.cuda.mem_get_info(index)
    return total_bytes - free
