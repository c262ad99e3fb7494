"""The all-reduce check: processes sum a tensor, and the sum and its speed are compared with what is expected.

Each process is a program of its own, because a broken network can make one hang or crash; it is ended after a time
limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from forgather.doctor.result import CheckResult, note, ok, wrong
from forgather.launch.multi_process import children_environment

PROBE = "forgather.ml.distributed.probe"
_NUM_BYTES = 8 * 2**20
_SLOW = {"gloo": 50e6, "nccl": 1e9}
"""Bytes per second below which a line says so: gloo over a fast Ethernet, and NCCL over sockets."""
_FIXES = {
    "gloo": "see the hostname and the interface above; GLOO_SOCKET_IFNAME selects another interface",
    "nccl": "NCCL_DEBUG=INFO shows the transport that it takes; NCCL_SOCKET_IFNAME selects another interface",
}


def all_reduce_here(backend: str, *, timeout: float, num_bytes: int = _NUM_BYTES) -> CheckResult:
    """Checks an all-reduce of two processes of this machine.

    Args:
        backend: "gloo" or "nccl".
        timeout: the maximum time, in seconds.
        num_bytes: the size of the tensor.
    """
    store = import_module(PROBE).open_store("127.0.0.1", 0, is_host=True, timeout_seconds=timeout)
    return all_reduce(
        backend, ("127.0.0.1", store.port), ranks=(0, 1), world_size=2, timeout=timeout, num_bytes=num_bytes
    )


def all_reduce(
    backend: str,
    address: tuple[str, int],
    *,
    ranks: Sequence[int],
    world_size: int,
    timeout: float,
    num_bytes: int = _NUM_BYTES,
) -> CheckResult:
    """Checks an all-reduce, of which this machine has some of the processes.

    Args:
        backend: "gloo" or "nccl".
        address: the host and the port of a store.
        ranks: the ranks of the processes of this machine.
        world_size: the number of all processes.
        timeout: the maximum time, in seconds.
        num_bytes: the size of the tensor.
    """
    name = f"all-reduce ({backend})"
    host, port = address
    started = [
        _start(
            backend=backend, host=host, port=port, rank=rank, world_size=world_size, num_bytes=num_bytes,
            local_rank=local, timeout=timeout,
        )
        for local, rank in enumerate(ranks)
    ]  # fmt: skip
    answers = [_result(process, timeout) for process in started]
    results, problem = [answer for answer, _ in answers], next((why for _, why in answers if why), "")
    for process in started:
        process.kill()
        process.wait()
    if problem:
        return wrong(name, f"it failed: {problem}", _FIXES[backend])
    if not all(one["is_right"] for one in results):
        return wrong(name, "the sum is wrong", "exchange the hardware: a link or a device changes numbers")
    speed = min(one["bytes_per_second"] for one in results)
    said = f"{world_size} processes, {speed / 1e9:.2f} GB/s"
    if speed < _SLOW[backend]:
        return note(name, f"{said}, which is slow", _FIXES[backend], bytes_per_second=speed)
    return ok(name, said, bytes_per_second=speed)


def _start(**settings: Any) -> subprocess.Popen[str]:
    with children_environment():
        return subprocess.Popen(
            [sys.executable, "-m", PROBE, json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def _result(process: subprocess.Popen[str], timeout: float) -> tuple[dict[str, Any], str]:
    """Returns what a process printed, and why it printed nothing."""
    try:
        out, err = process.communicate(timeout=timeout + 30)  # PyTorch is imported first
    except subprocess.TimeoutExpired:
        return {}, f"no answer in {timeout:.0f} s"
    if process.returncode:
        lines = [line for line in err.strip().splitlines() if line.strip()]
        last = lines[-1].strip()[:200] if lines else f"status {process.returncode}"
        return {}, next((line.strip()[:200] for line in reversed(lines) if "Error" in line), last)
    return json.loads(out.strip().splitlines()[-1]), ""
