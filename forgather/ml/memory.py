"""The memory that the current process uses, and the memory that is available on this machine.

No function in this module waits for a device.

Units:
    bytes.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_STATM = "/proc/self/statm"
_MEMINFO = "/proc/meminfo"


def memory_facts(device: torch.device) -> dict[str, float]:
    """Returns the CUDA memory in use if the device is a CUDA device, and otherwise the memory of the current process.

    Args:
        device: the device that the rank computes on.

    Returns:
        "memory_bytes"; for a CUDA device also "memory_peak_bytes" and "memory_reserved_bytes".

    Units:
        bytes.
    """
    if device.type == "cuda":
        return {
            "memory_bytes": torch.cuda.memory_allocated(device),
            "memory_peak_bytes": torch.cuda.max_memory_allocated(device),
            "memory_reserved_bytes": torch.cuda.memory_reserved(device),
        }
    try:
        with open(_STATM, "rb") as stream:
            # The second field is the resident set, in pages.
            return {"memory_bytes": int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    except OSError:
        return {"memory_bytes": _peak_bytes()}


def _peak_bytes() -> int:
    """Returns the peak memory of the current process, for systems that do not report the current memory."""
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # `ru_maxrss` is in bytes on macOS and in KiB on Linux.
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int | None:
    """Returns the memory that can still be allocated on this machine, or None if the system does not report it.

    Units:
        bytes.
    """
    # Only Linux has the file.
    with suppress(OSError), open(_MEMINFO) as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
