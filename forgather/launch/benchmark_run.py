"""Measures the cells of a benchmark, each in processes of its own.

Takes a benchmark and gives a `Row` for each cell. A cell that cannot run here is refused before it starts, with the
figure that is too large; a cell that fails, hangs or is killed is a row with the reason, and the next one runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from forgather.available_memory import available_bytes
from forgather.launch.bound_process import BoundProcess
from forgather.launch.multi_process import children_environment
from forgather.planner.benchmark_results import Row, Status
from forgather.planner.hardware import Hardware, hardware, hardware_names
from forgather.planner.memory_plan import format_size

# Modules outside `forgather.ml` reach it only by name, so that commands without training never load torch.
_CELL = "forgather.ml.benchmark_cell"
_BOUND = "forgather.launch.bound_process"
_DEVICE = "forgather.ml.planner.devices_here:device_here"
_ENDING_SECONDS = 10.0
_GB = 1e9


def run_cells(
    cells: list[Mapping[str, Any]],
    before: list[Row],
    *,
    use_cpu: bool,
    steps: int,
    timeout: float,
    announce: Callable[[str], None],
) -> Iterator[Row]:
    """Yields the row of each cell in turn. A cell that was measured before in the same way is not measured again.

    Args:
        cells: the cells of the benchmark.
        before: the rows that were measured before.
        use_cpu: True to measure on the CPU, whatever hardware a cell was planned for.
        steps: the number of steps whose time is measured.
        timeout: the seconds after which a cell is ended.
        announce: a function that is called with the name of each cell that starts.
    """
    for cell in cells:
        known = next((row for row in before if row.cell == cell and row.use_cpu == use_cpu), None)
        if known is not None:
            yield known
            continue
        reason = refusal(cell, use_cpu=use_cpu)
        if reason is not None:
            yield Row(cell=cell, status=Status.REFUSED, use_cpu=use_cpu, reason=reason)
            continue
        announce(cell["name"])
        found = _measured(cell["config"], use_cpu=use_cpu or _is_for_cpu(cell), steps=steps, timeout=timeout)
        if "error" in found:
            yield Row(cell=cell, status=Status.FAILED, use_cpu=use_cpu, reason=found["error"])
        else:
            yield Row(cell=cell, status=Status.MEASURED, use_cpu=use_cpu, measured=found)


def refusal(cell: Mapping[str, Any], *, use_cpu: bool) -> str | None:
    """Returns why a cell cannot be measured on this machine, or None if it can.

    Args:
        cell: the cell.
        use_cpu: True to measure on the CPU.
    """
    config = cell.get("config")
    if config is None:
        return f"not planned: {cell['reason']}"
    gpus, memory = config["gpu_count"], config["estimated_memory"]
    tensors = memory["per_gpu_gb"] - memory["overhead_gb"] + memory["host_gb"]
    if use_cpu or _is_for_cpu(cell):
        free = available_bytes()
        if free is None or tensors * gpus <= free / _GB:
            return None
        need = format_size(tensors * gpus * _GB)
        return f"the plan needs {need} for {gpus} on this machine, and {format_size(free)} are free"
    here: tuple[Hardware, int] | None = _function(_DEVICE)(gpus)
    if here is None:
        return "this machine has no GPU; --use-cpu measures on the CPU, with gloo in place of NCCL"
    count = import_module("forgather.ml.distributed.launcher").count_devices()
    if count < gpus:
        return f"the cell has {gpus} devices, and this machine has {count}"
    device, held = here
    free = (device.memory_bytes or 0) - held
    if device.memory_bytes and memory["per_gpu_gb"] > free / _GB:
        need = format_size(memory["per_gpu_gb"] * _GB)
        return f"the plan needs {need} on each {device.title}, and {format_size(free)} are free"
    return None


def _is_for_cpu(cell: Mapping[str, Any]) -> bool:
    device = cell["config"]["device"]
    return cell.get("hardware") == "cpu" or (device in hardware_names() and hardware(device).kind == "cpu")


def _function(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(import_module(module), attribute)


def _measured(config: Mapping[str, Any], *, use_cpu: bool, steps: int, timeout: float) -> dict[str, Any]:
    """Returns what the processes of a cell have measured, or a mapping with their "error"."""
    with tempfile.TemporaryDirectory(prefix="forgather-benchmark-") as folder:
        asked = os.path.join(folder, "asked.json")
        with open(asked, "w", encoding="utf-8") as stream:
            json.dump({"config": config, "use_cpu": use_cpu, "steps": steps}, stream)
        words = [sys.executable]
        if config["gpu_count"] > 1 or config["distributed_strategy"] != "DDP":
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config['gpu_count']}"]
        words += ["-m", _BOUND, _CELL, folder]
        status = _ended(words, os.path.join(folder, "output.txt"), timeout)
        for name in ("error.json", "measured.json"):
            with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name), encoding="utf-8") as stream:
                found: dict[str, Any] = json.load(stream)
                return found
        return {"error": status or _last_line(os.path.join(folder, "output.txt"))}


def _ended(words: list[str], output: str, timeout: float) -> str:
    """Runs a command in a session of its own until it ends, and returns what is known of its end from outside."""
    with children_environment(), open(output, "w", encoding="utf-8") as stream:
        child = BoundProcess(words, env=os.environ, stdout=stream, stderr=subprocess.STDOUT)
    try:
        status = child.wait(timeout)
    except subprocess.TimeoutExpired:
        _end(child)
        return f"it was ended after {timeout:g} s (--timeout)"
    except BaseException:
        _end(child)
        raise
    child.close_lifeline()
    if status < 0:
        why = ", as the system does when memory runs out" if status == -signal.SIGKILL else ""
        return f"it was ended by {signal.Signals(-status).name}{why}"
    return ""


def _end(child: BoundProcess) -> None:
    # torchrun ends its processes, which have sessions of their own, when it is asked to end.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_ENDING_SECONDS)
    child.end()


def _last_line(output: str) -> str:
    with open(output, encoding="utf-8", errors="replace") as stream:
        lines = [line.strip() for line in stream if line.strip()]
    return lines[-1][:300] if lines else "it ended without a result"
