"""Records what others estimate for the cells with which the planner is tested: accelerate, DeepSpeed, and formulas.

Each estimate answers the question of the cell: the peak of a step on one rank. Where it says nothing about how the
model is divided, it is given the part of one rank, so that no estimate is worse than it has to be. Run `make oracles`.

Example:
    python scripts/oracles/memory_estimates.py        writes tests/ml/recorded/memory_estimates.json

Source:
    accelerate: `calculate_maximum_sizes`, and `estimate_training_usage` of `accelerate estimate-memory`: weights,
    gradients and the state of Adam. It leaves out activations and messages.
    DeepSpeed: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`: the same in mixed
    precision, divided as by ZeRO (and by FSDP2). It leaves out activations and buckets, and has no answer for adapters,
    tensor parallelism and pipelines.
    Published formulas: 16 bytes for each trained weight, divided as in Rajbhandari et al. 2020 (arXiv:1910.02054,
    figure 1), and the activations of Korthikanti et al. 2022 (arXiv:2205.05198, equations 1, 2 and 5, and section 4.3
    for the logits), with float32 as twice the width. They leave out gathered weights and messages, and have no answer
    for a module that is no transformer.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from forgather.ml.adapters import lora  # noqa: E402
from tests.ml.planner import cell_models  # noqa: E402
from tests.ml.planner.cells import FULL, QUICK, Cell  # noqa: E402
from tests.ml.planner.model_cells import CELLS  # noqa: E402

RECORD = ROOT / "tests" / "ml" / "recorded" / "memory_estimates.json"
PACKAGES = ("accelerate", "deepspeed", "transformers", "torch")


def model_of(cell: Cell) -> nn.Module:
    """Returns the model of a cell, with its adapter."""
    model = cell_models.model(cell.model, cell.layers, **cell.sizes)
    return lora(r=4).apply(model, seed=0) if cell.adapter else model


def stage_of(cell: Cell) -> int:
    """Returns what is divided, as a stage of ZeRO: 0 for nothing."""
    settings = cell.args.get("deepspeed")
    if settings:
        return int(settings["zero_optimization"]["stage"])
    return {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2}.get(cell.args.get("fsdp", ""), 0)


def ranks_of(cell: Cell) -> tuple[int, int, int]:
    """Returns among how many ranks a stage of ZeRO, tensor parallelism and a pipeline divide the model."""
    tensor = cell.args.get("tensor_parallel_size", 1)
    replicas = cell.args.get("data_parallel_size", 1)
    pipeline = cell.world_size // replicas if cell.kind == "PipelineTrainer" else 1
    shards = cell.args.get("fsdp_config", {}).get("shard_size", cell.world_size // (tensor * pipeline))
    return shards if stage_of(cell) else 1, tensor, pipeline


def by_accelerate(cell: Cell, model: nn.Module) -> int:
    """Returns the estimate of accelerate; a frozen weight has no gradient and no state."""
    shards, tensor, pipeline = ranks_of(cell)
    whole, _ = calculate_maximum_sizes(model)
    trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    usage = estimate_training_usage(int(whole), "bfloat16" if cell.args.get("bf16") else "float32")
    estimate = max(usage.values())
    if cell.adapter:
        estimate = int(whole) + 3 * trained
    return int(estimate // (shards * tensor * pipeline))


def by_deepspeed(cell: Cell, model: nn.Module) -> int | None:
    """Returns the estimate of DeepSpeed, None where it has none."""
    shards, tensor, pipeline = ranks_of(cell)
    if cell.adapter or tensor * pipeline > 1:
        return None
    count = sum(one.numel() for one in model.parameters())
    if stage_of(cell) == 3:
        largest = max(sum(one.numel() for one in part.parameters(recurse=False)) for part in model.modules())
        _, found, _ = estimate_zero3_model_states_mem_needs(
            count, largest, num_gpus_per_node=shards, num_nodes=1, cpu_offload=False, cpu_offload_params=False
        )
        return int(found)
    _, found = estimate_zero2_model_states_mem_needs(count, num_gpus_per_node=shards, num_nodes=1, cpu_offload=False)
    return int(found)


def by_formulas(cell: Cell, model: nn.Module) -> int | None:
    """Returns the estimate of the published formulas, None where they have none."""
    if cell.model == "own":
        return None
    shards, tensor, pipeline = ranks_of(cell)
    stage, config = stage_of(cell), model.config
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    frozen = sum(one.numel() for one in model.parameters()) - trained
    divided = [shards if stage >= least else 1 for least in (3, 2, 1)]
    state = 4 * (trained + frozen) / divided[0] + 4 * trained / divided[1] + 8 * trained / divided[2]
    rows = cell.args.get("per_device_train_batch_size", 8)
    micro = rows / cell.args.get("pipeline_chunks", 1)
    kept = activations(cell, config, rows=micro, tensor=tensor)
    if pipeline > 1:
        # The first stage keeps as many micro-batches as there are stages; GPipe and looped BFS keep all.
        keeps_all = any(word in cell.args["schedule_class"] for word in ("GPipe", "LoopedBFS"))
        kept *= (rows / micro if keeps_all else pipeline) / pipeline
    logits = 4 * micro * cell.length * config.vocab_size if cell.model not in ("bert", "vit") else 0
    return int(state / (tensor * pipeline) + kept + (logits if pipeline == 1 else 0))


def activations(cell: Cell, config: Any, *, rows: float, tensor: int) -> float:
    """Returns the bytes of the activations of all blocks."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    tokens = (config.image_size // config.patch_size) ** 2 + 1 if cell.model == "vit" else cell.length
    wide = 1 if cell.args.get("bf16") else 2
    part = rows * tokens * hidden * wide
    # Attention with dropout, and that of T5, keeps its scores on a CPU.
    scores = 5 * heads * tokens**2 * rows * wide if cell.model in ("gpt2", "bert", "t5") else 0
    block = part * (10 + 24 / tensor) + scores / tensor
    blocks = cell.layers * (1.5 if cell.model == "t5" else 1)  # the targets of T5 are half as long
    if cell.args.get("gradient_checkpointing"):
        return 2 * part * blocks + block
    return block * blocks


def main() -> None:
    """Records the estimates of all cells."""
    cells = {}
    for cell in (*QUICK, *FULL, *CELLS):
        model = model_of(cell)
        estimates = {
            "accelerate": by_accelerate(cell, model),
            "DeepSpeed": by_deepspeed(cell, model),
            "published formulas": by_formulas(cell, model),
        }
        cells[str(cell)] = {name: found for name, found in estimates.items() if found is not None}
    record = {"versions": {name: version(name) for name in PACKAGES}, "cells": cells}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
