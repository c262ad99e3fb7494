"""The resources that a process and its machine use: memory of GPUs, CPU, memory, network and disk.

`SystemStats.read` returns plain data. What cannot be measured is None; if NVML is missing, this is logged once. No call
waits for a device.

Units:
    bytes, and bytes per second since the call before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import psutil
import torch

from forgather.ml.log import get_logger

_log = get_logger(__name__)


class SystemStats:
    """Reads the use of resources.

    Args:
        gpu_memory: whether GPUs are read.
        cpu_memory: whether memory and CPU time are read.
        network: whether the traffic of the machine's network interfaces is read.
        folder: a folder on the disk whose free space is read.
    """

    def __init__(
        self, *, gpu_memory: bool = True, cpu_memory: bool = True, network: bool = True, folder: str = "."
    ) -> None:
        self._wanted = {"gpu_memory": gpu_memory, "cpu_memory": cpu_memory, "cpu": cpu_memory, "network": network}
        self._folder = folder
        self._process = psutil.Process()
        # The first call of `cpu_percent` has nothing to compare with.
        self._process.cpu_percent()
        self._last: dict[str, tuple[float, Mapping[str, int]]] = {}

    def read(self) -> dict[str, Any]:
        """Returns the use of resources now.

        Returns:
            `gpu_memory`: a list with an entry for each GPU that this process sees, empty without one. `cpu_memory`,
            `cpu`, `network`, `disk`: mappings. What is not tracked or cannot be measured is None.
        """
        readers = {
            "gpu_memory": gpu_facts,
            "cpu_memory": self._memory,
            "cpu": self._cpu,
            "network": self._network,
            "disk": self._disk,
        }
        found: dict[str, Any] = dict.fromkeys(readers)
        for name, read in readers.items():
            # A container may hide what psutil reads.
            with suppress(OSError, psutil.Error, RuntimeError, AttributeError):
                found[name] = read() if self._wanted.get(name, True) else None
        return found

    def _memory(self) -> dict[str, Any]:
        whole = psutil.virtual_memory()
        return {
            "process_bytes": self._process.memory_info().rss,
            "available_bytes": whole.available,
            "total_bytes": whole.total,
            "used_fraction": whole.percent / 100,
        }

    def _cpu(self) -> dict[str, Any]:
        # In percent of one core, as top shows it.
        return {"process_percent": self._process.cpu_percent(), "cores": os.cpu_count()}

    def _network(self) -> dict[str, Any]:
        # Traffic of a machine with itself is no network traffic.
        cards = [io for name, io in psutil.net_io_counters(pernic=True).items() if not name.startswith("lo")]
        counts = {"sent": sum(io.bytes_sent for io in cards), "received": sum(io.bytes_recv for io in cards)}
        return self._with_rates("network", counts)

    def _disk(self) -> dict[str, Any]:
        space = psutil.disk_usage(self._folder)
        facts: dict[str, Any] = {"free_bytes": space.free, "total_bytes": space.total}
        with suppress(psutil.Error, AttributeError, NotImplementedError, OSError):
            io = self._process.io_counters()
            facts |= self._with_rates("disk", {"read": io.read_bytes, "written": io.write_bytes})
        return facts

    def _with_rates(self, name: str, counts: Mapping[str, int]) -> dict[str, Any]:
        now = time.monotonic()
        then, before = self._last.get(name, (now, counts))
        self._last[name] = (now, counts)
        facts: dict[str, Any] = {f"{key}_bytes": count for key, count in counts.items()}
        if now > then:
            facts |= {f"{key}_bytes_per_second": (counts[key] - before[key]) / (now - then) for key in counts}
        return facts


def gpu_facts() -> list[dict[str, Any]]:
    """Returns the memory of each GPU that this process sees, with its load if NVML can be read."""
    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"device": index, "name": torch.cuda.get_device_name(index)}
    # `mem_get_info` would make a context, which takes memory, on a device that this process does not use.
    has_context = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if has_context and index == torch.cuda.current_device():
        free, total = torch.cuda.mem_get_info(index)
        facts |= {
            "used_bytes": total - free,
            "total_bytes": total,
            "allocated_bytes": torch.cuda.memory_allocated(index),
            "peak_bytes": torch.cuda.max_memory_allocated(index),
        }
    return facts | _nvml_facts(index)


def _nvml_facts(index: int) -> dict[str, Any]:
    """Returns what NVML says about a GPU; {} without NVML, which is said once."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        _log.warning_once("the load of GPUs is not measured: pip install 'forgather[nvml]'")
        return {}
    try:
        nvml.nvmlInit()
        # NVML numbers all GPUs of the machine; CUDA numbers those that this process may see.
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode())
        memory, load = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetUtilizationRates(handle)
    except (nvml.NVMLError, AttributeError, RuntimeError) as error:
        _log.warning_once("the load of GPUs is not measured: NVML says %s", error)
        return {}
    return {"used_bytes": memory.used, "total_bytes": memory.total, "load": load.gpu / 100}


def memory_share() -> float | None:
    """Returns which share of the memory of this process's GPU is in use, by all processes; None without a GPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    free, total = torch.cuda.mem_get_info()
    return 1 - free / total
