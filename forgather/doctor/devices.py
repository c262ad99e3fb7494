"""Checks of accelerators: what PyTorch sees, whether it fits the driver, and how devices are connected.

Takes the facts that `forgather/ml/distributed/probe.py` collects with PyTorch, and what the system shows without it.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from typing import Any

from forgather.doctor.result import CheckResult, not_checked, note, ok, wrong

_NO_GPU = "not measured: this machine has no GPU"


def gpus_of_system(root: str = "/") -> int:
    """Returns the number of NVIDIA GPUs whose driver is loaded, without PyTorch.

    Args:
        root: the root of the file system.
    """
    return len(glob.glob(f"{root.rstrip('/')}/proc/driver/nvidia/gpus/*"))


def check_devices(facts: Mapping[str, Any], gpus: int, environ: Mapping[str, str]) -> CheckResult:
    """Checks that PyTorch sees the GPUs of the machine.

    Args:
        facts: the facts of `device_facts`.
        gpus: the number of GPUs that the driver has.
        environ: the environment variables.
    """
    name = "devices"
    seen, hidden = len(facts["devices"]), environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and not facts["built_with"]:
        fix = "install a PyTorch with CUDA: https://pytorch.org/get-started"
        return wrong(name, f"{gpus} GPUs, and PyTorch {facts['torch']} is built without CUDA", fix)
    if gpus and not seen and hidden is None:
        reason = f": {facts['problem']}" if facts["problem"] else ""
        fix = f"update the driver to one for CUDA {facts['built_with']}, or install a PyTorch for the driver"
        return wrong(name, f"{gpus} GPUs, and PyTorch can use none{reason}", fix)
    if gpus and not seen:
        return wrong(
            name, f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides all {gpus} GPUs", "unset CUDA_VISIBLE_DEVICES"
        )
    if not seen:
        return note(name, f"CPU only (PyTorch {facts['torch']})")
    models = sorted({device["name"] for device in facts["devices"]})
    found = f"{seen} x {', '.join(models)}; PyTorch {facts['torch']}, CUDA {facts['built_with']}"
    if len(models) > 1:
        return note(name, found, "devices of different kinds wait for the slowest one")
    if hidden is not None and seen < gpus:
        return note(name, f"{found}; CUDA_VISIBLE_DEVICES={hidden} hides {gpus - seen}")
    return ok(name, found)


def check_device_memory(facts: Mapping[str, Any]) -> CheckResult:
    """Checks that no other process holds much of a GPU's memory."""
    name = "device memory"
    if not facts["devices"]:
        return not_checked(name, _NO_GPU)
    held = [(n, one["total_bytes"] - one["free_bytes"]) for n, one in enumerate(facts["devices"])]
    taken = [f"GPU {n}: {bytes_ / 2**30:.1f} GiB" for n, bytes_ in held if bytes_ > 2 * 2**30]
    if taken:
        return wrong(
            name, f"other processes hold {', '.join(taken)}", "end them (nvidia-smi lists them), or use --devices"
        )
    return ok(name, f"{min(one['free_bytes'] for one in facts['devices']) / 2**30:.1f} GiB free on each device")


def check_connections(facts: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Checks that each GPU reaches the memory of each other one, and says by what."""
    if len(facts["devices"]) < 2:
        reason = _NO_GPU if not facts["devices"] else "not measured: this machine has one GPU"
        yield not_checked("peer access", reason)
        yield not_checked("NVLink", reason)
        return
    apart = [f"{a}-{b}" for a, b in facts["without_peer_access"]]
    if apart:
        fix = "in a virtual machine or container, allow peer access (ACS off); NCCL uses the host's memory without it"
        yield wrong("peer access", f"none between GPUs {', '.join(apart)}", fix)
    else:
        yield ok("peer access", "between all GPUs")
    links = facts["nvlinks"]
    if links is None:
        yield not_checked("NVLink", "not measured: nvidia-smi gave no answer")
    else:
        yield ok("NVLink", f"{links} active links") if links else note("NVLink", "none: GPUs are connected by PCIe")
