"""Benchmarks as data: which cells of hardware, GPUs and strategy a model is measured in.

Takes the name of a model; gives a mapping that `fgcli benchmark` writes as JSON, and that `fgcli benchmark run` reads,
executes and completes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forgather.errors import PlanError, first_line
from forgather.planner.model_shapes import model_shape
from forgather.planner.selection import HardwareSelector

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
                if device == "cpu" and strategy == "DeepSpeed":
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


def read_benchmark(file: str) -> dict[str, Any]:
    """Returns the benchmark that a file holds.

    Raises:
        PlanError: FG998 if the file cannot be read, or holds something else.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            data = json.load(stream)
    except (OSError, ValueError) as error:
        raise PlanError(f"{file!r} cannot be read as a benchmark: {first_line(error)}", code="FG998") from error
    cells = data.get("cells") if isinstance(data, Mapping) and data.get("format") == FORMAT else None
    if not isinstance(cells, list) or not all(_is_cell(cell) for cell in cells):
        raise PlanError(
            f"{file!r} is not a benchmark of the format {FORMAT!r}",
            code="FG998",
            hint="'fgcli benchmark --model NAME --output FILE' writes one",
        )
    return dict(data)


def _is_cell(cell: Any) -> bool:
    if not isinstance(cell, Mapping) or not {"name", "hardware"} <= cell.keys():
        return False
    config = cell.get("config")
    needed = {"distributed_strategy", "gpu_count", "per_gpu_batch_size", "gradient_accumulation_steps", "model_name"}
    return "reason" in cell if config is None else isinstance(config, Mapping) and needed <= config.keys()
