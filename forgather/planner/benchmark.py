"""Benchmarks as data: which cells of hardware, GPUs and strategy a model is measured in.

Takes the name of a model; gives a mapping that `fgcli benchmark` writes as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forgather.errors import PlanError
from forgather.planner.model_shapes import model_shape
from forgather.planner.selection import HardwareSelector, device_kind

FORMAT = "forgather-benchmark-1"
STRATEGIES = ("DDP", "FSDP", "DeepSpeed")


def benchmark(
    model_name: str,
    *,
    hardware: Sequence[str] = ("cuda",),
    distributed: bool = False,
    max_gpus: int = 1,
    batch_size: int = 8,
    max_memory_gb: float | None = None,
    sequence_length: int | None = None,
) -> dict[str, Any]:
    """Returns a benchmark of one model: one cell for each hardware, number of GPUs and strategy.

    Args:
        model_name: the name of a model with a shape file.
        hardware: kinds ("cuda", "rocm", "cpu") or names of devices.
        distributed: True to add 2, 4, 8, ... GPUs, up to `max_gpus`.
        max_gpus: the largest number of GPUs.
        batch_size: the rows of one optimizer step on each GPU.
        max_memory_gb: the memory of each GPU, in GB of 10^9 bytes.
        sequence_length: the tokens of a row.

    Raises:
        PlanError: FG998 for an unknown name or a number out of range.
    """
    shape = model_shape(model_name)
    if max_gpus < 1:
        raise PlanError(f"max_gpus is {max_gpus}: it is a whole number from 1", code="FG998", found=max_gpus)
    counts = [1]
    while distributed and counts[-1] < max_gpus:
        counts.append(min(2 * counts[-1], max_gpus))
    cells = []
    for device in hardware:
        for gpus in counts:
            for strategy in STRATEGIES if gpus > 1 else ("DDP",):
                if strategy == "DeepSpeed" and device_kind(device) == "cpu":
                    continue
                cell: dict[str, Any] = {"name": f"{device} x {gpus} {strategy}", "hardware": device}
                try:
                    cell["config"] = HardwareSelector().get_strategy_config(
                        strategy,
                        shape.family,
                        shape.name,
                        gpus,
                        batch_size,
                        max_memory_gb,
                        sequence_length=sequence_length,
                        device=device,
                    )
                except PlanError as error:
                    if error.code != "FG999":
                        raise
                    cell["reason"] = error.message
                cells.append(cell)
    return {"format": FORMAT, "model": shape.name, "family": shape.family, "cells": cells}
