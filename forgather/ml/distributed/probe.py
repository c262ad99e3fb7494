"""What the doctor asks PyTorch: facts about devices, a store that machines meet at, and an all-reduce that is timed.

`device_facts` and `open_store` are called by name from `forgather/doctor`. As a program, this module is one process of
an all-reduce: it prints a line of JSON with the result.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore


def device_facts() -> dict[str, Any]:
    """Returns the versions, the devices, and the pairs of devices that do not reach each other's memory.

    Units:
        `total_bytes` and `free_bytes` of each device are in bytes.
    """
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "built_with": torch.version.cuda or torch.version.hip or "",
        "problem": "",
        "devices": [],
        "without_peer_access": [],
        "nvlinks": None,
    }
    if not facts["built_with"]:
        return facts
    try:
        # The message of the driver is in the error of the first use.
        torch.zeros(1, device="cuda")
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        facts["problem"] = str(error).splitlines()[0][:200]
        return facts
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        facts["devices"].append({"name": name, "free_bytes": free, "total_bytes": total})
    facts["without_peer_access"] = [
        (a, b) for a in range(count) for b in range(a) if not torch.cuda.can_device_access_peer(a, b)
    ]
    facts["nvlinks"] = _nvlinks() if count > 1 else None
    return facts


def _nvlinks() -> int | None:
    """Returns the number of active NVLinks of all devices; None if nvidia-smi gives no answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "nvlink", "--status"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else sum("GB/s" in line for line in done.stdout.splitlines())


def open_store(host: str, port: int, *, is_host: bool, timeout_seconds: float) -> TCPStore:
    """Returns the store at an address, which this process serves if `is_host` is true.

    Args:
        host: the address of machine 0.
        port: the port.
        is_host: whether this process serves the store.
        timeout_seconds: the maximum wait for the store and for a key, in seconds.

    Raises:
        RuntimeError: from torch, if the store does not answer in time or its port is in use.
    """
    return TCPStore(host, port, None, is_host, datetime.timedelta(seconds=timeout_seconds), wait_for_workers=False)


def backends() -> list[str]:
    """Returns the backends with which an all-reduce can be timed on this machine: gloo, and nccl with two GPUs."""
    found = ["gloo"] if dist.is_gloo_available() else []
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available() and torch.cuda.device_count() > 1
    return [*found, "nccl"] if has_nccl else found


def all_reduce(
    backend: str, host: str, port: int, rank: int, world_size: int, *, num_bytes: int, local_rank: int, timeout: float
) -> dict[str, Any]:
    """Sums a tensor over processes, several times; returns whether the sum was right, and how fast it was.

    Args:
        backend: "gloo" or "nccl".
        host: the address of the store, which another process serves.
        port: the port of the store.
        rank: the rank of this process.
        world_size: the number of processes.
        num_bytes: the size of the tensor.
        local_rank: the rank on this machine, which selects a GPU.
        timeout: the maximum wait, in seconds.

    Units:
        `bytes_per_second` is what each process sends and receives (bus bandwidth), as nccl-tests define it.
    """
    limit = datetime.timedelta(seconds=timeout)
    store = PrefixStore(f"all_reduce_{backend}", TCPStore(host, port, None, False, limit, wait_for_workers=False))
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    values = torch.full((num_bytes // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    expected = world_size * (world_size + 1) / 2
    is_right = bool((values == expected).all())
    times = []
    for _ in range(5):
        values.fill_(1.0)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    sent = num_bytes * 2 * (world_size - 1) / world_size
    return {"is_right": is_right, "bytes_per_second": sent / sorted(times)[len(times) // 2], "device": device.type}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(all_reduce(**json.loads(sys.argv[1]))) + "\n")
