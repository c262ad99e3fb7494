"""The processors of this machine as the device of a process: rates that are measured, because no table has them.

`processors_here` times products of matrices and copies of memory for a fraction of a second, with the number of threads
that a process has.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import torch

from forgather.available_memory import container_limit
from forgather.planner.hardware import Hardware

_SIDE = 768
_COPIED = 1 << 26  # larger than caches
_SECONDS = 0.2
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def processors_here(*, threads: int, processes: int) -> Hardware:
    """Returns the processors of this machine as the device of one of several processes.

    The memory is the equal part of each process.

    Args:
        threads: the number of threads of each process.
        processes: the number of processes on the machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rates = {name: 2 * _SIDE**3 / _fastest(_product(dtype)) for name, dtype in _TYPES.items()}
        bandwidth = 2 * _COPIED / _fastest(_copy())
    finally:
        torch.set_num_threads(before)
    source = f"measured on {platform.node()}, {datetime.now(UTC):%Y-%m-%d}"
    # A type that is emulated is no slower device: work in it is rare, and the rate is still the true one.
    return Hardware(
        name=platform.node(),
        title=f"{_model()}, {threads} thread{'s' * (threads > 1)} of each process",
        kind="cpu",
        memory_bytes=_memory() // processes,
        memory_bytes_per_second=bandwidth,
        peak_flops=rates,
        sources=dict.fromkeys((*rates, "memory_mib", "memory_gb_per_second"), source),
    )


def _product(dtype: torch.dtype) -> Callable[[], object]:
    factor = torch.ones(_SIDE, _SIDE, dtype=dtype)
    product = torch.empty_like(factor)
    return lambda: torch.mm(factor, factor, out=product)


def _copy() -> Callable[[], object]:
    source = torch.ones(_COPIED, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _fastest(work: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of several calls: other load only makes calls slower."""
    work()
    found: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(found) < 3:
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def _memory() -> int:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, container_limit() or whole)


def _model() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as stream:
        if (found := re.search(r"^model name\s*:\s*(.+)$", stream.read(), re.MULTILINE)) is not None:
            return found[1].strip()
    return platform.processor() or platform.machine()
