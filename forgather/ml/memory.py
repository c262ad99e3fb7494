"""The memory that the current process uses.

No function in this module waits for a device.

Units:
    bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_STATM = "/proc/self/statm"
_STATUS = "/proc/self/status"
_CLEAR_REFS = "/proc/self/clear_refs"
_earlier_peaks: dict[torch.device, int] = {}
"""The peaks of CUDA devices before `peak_since_last` began to measure again."""


def memory_facts(device: torch.device) -> dict[str, float]:
    """Returns the CUDA memory in use if the device is a CUDA device, and otherwise the memory of the current process.

    Args:
        device: the device that the rank computes on.

    Returns:
        "memory_bytes"; for a CUDA device also "memory_peak_bytes", "memory_reserved_bytes", "memory_fragmentation"
        (the share of the reserved memory that is free in blocks of which a part is in use, so that it cannot be given
        back to the device) and, if there were any, "memory_retries": how often memory was freed to allocate more.

    Units:
        bytes.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        retries = stats.get("num_alloc_retries", 0)
        return {
            "memory_bytes": torch.cuda.memory_allocated(device),
            "memory_peak_bytes": max(torch.cuda.max_memory_allocated(device), _earlier_peaks.get(device, 0)),
            "memory_reserved_bytes": torch.cuda.memory_reserved(device),
            "memory_fragmentation": fragmentation(stats),
            **({"memory_retries": retries} if retries else {}),
        }
    try:
        with open(_STATM, "rb") as stream:
            # The second field is the resident set, in pages.
            return {"memory_bytes": int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    except OSError:
        return {"memory_bytes": _peak_bytes()}


def fragmentation(stats: Mapping[str, int]) -> float:
    """Returns the share of the reserved memory of a CUDA device that lies between blocks in use.

    Args:
        stats: what `torch.cuda.memory_stats` returned.

    Example:
        >>> fragmentation({"inactive_split_bytes.all.current": 3, "reserved_bytes.all.current": 12})
        0.25
        >>> fragmentation({})
        0.0
    """
    reserved = stats.get("reserved_bytes.all.current", 0)
    return stats.get("inactive_split_bytes.all.current", 0) / reserved if reserved else 0.0


def peak_since_last(device: torch.device) -> int | None:
    """Returns the peak of the memory since the last call, and begins to measure again.

    `memory_facts` still reports the peak of the whole run.

    Args:
        device: a CUDA device, or any other one for the resident memory of the process.

    Returns:
        The peak, or None on systems that do not report it.

    Units:
        bytes.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        _earlier_peaks[device] = max(peak, _earlier_peaks.get(device, 0))
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    try:
        with open(_STATUS) as stream:
            peak = next(int(line.split()[1]) * 1024 for line in stream if line.startswith("VmHWM:"))
        # 5 sets the peak of the resident memory back to its current value.
        with open(_CLEAR_REFS, "w") as stream:
            stream.write("5")
    except (OSError, StopIteration):
        return None
    return peak


def local_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor on this rank that has the memory of a tensor; None for a wrapper without memory."""
    # A DTensor has its part on this rank inside, and a result that is still on its way the tensor that receives it.
    for name in ("_local_tensor", "elem"):
        tensor = getattr(tensor, name, tensor)
    has_memory = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor if has_memory and not tensor.is_meta else None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a device or the host had too little memory."""
    words = ("CUDA error: out of memory", "HIP error: out of memory", "DefaultCPUAllocator: can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def _peak_bytes() -> int:
    """Returns the peak memory of the current process, for systems that do not report the current memory."""
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # `ru_maxrss` is in bytes on macOS and in KiB on Linux.
    return peak if sys.platform == "darwin" else peak * 1024
