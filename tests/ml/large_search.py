"""Searches the ways to train an 8B-shaped model on H200s, and prints what that takes as JSON.

    python -m tests.ml.large_search FOLDER GPUS ROWS

FOLDER is a project. The process is a new one: filters of warnings and what other tests have traced change the time.
"""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

from forgather.launch.finding import Search, find
from forgather.launch.planning import Device
from forgather.ml.planner import rank_trace
from forgather.planner.hardware import hardware
from forgather.project.project import Project
from tests.project.workbench import TINY_TRAINING

LARGE = {
    "ns.block_size = 16": "ns.block_size = 2048",
    "hidden_size: 8": "hidden_size: 4096",
    "intermediate_size: 16": "intermediate_size: 14336",
    "num_hidden_layers: 1": "num_hidden_layers: 32\n    max_position_embeddings: 8192\n    tie_word_embeddings: false",
    "num_attention_heads: 2": "num_attention_heads: 32",
    "num_key_value_heads: 2": "num_key_value_heads: 8",
    "use_cpu: true": "use_cpu: true\n    bf16: true",
}
"""What makes a model with the shape of an 8B out of the tiny one."""


def counted(function, calls):
    """Returns a function that does the same, and adds to a list each time."""

    def call(*given):
        calls.append(None)
        return function(*given)

    return call


def main(folder, gpus, rows):
    """Prints the cells of the ranking, and the CPU seconds, trainers and traced steps that it takes."""
    text = TINY_TRAINING
    for small, large in LARGE.items():
        text = text.replace(small, large)
    os.chdir(folder)
    Path("templates/configs/large.yaml").write_text(text)
    lines = (json.dumps({"text": f"{number} " * 4096}) for number in range(2 * rows))
    Path("rows.jsonl").write_text("\n".join(lines))
    # Imports are not counted.
    for name in ("forgather.ml", "forgather.ml.planner.batch_plans", "forgather.ml.data.tokenizer", "deepspeed"):
        import_module(name)
    trainers, steps = [], []
    rank_trace.planned_batches = counted(rank_trace.planned_batches, trainers)
    rank_trace.facts_of = counted(rank_trace.facts_of, steps)
    began = time.process_time()
    found = find(Project("large"), Search(gpus=gpus, nodes=1, device=Device(hardware("h200")), rows=rows))
    seconds = time.process_time() - began
    counts = {"seconds": seconds, "trainers": len(trainers), "steps": len(steps), "traced": found.traced}
    ranking = [(cell.title, cell.is_verified) for cell in found.ranking]
    print(json.dumps({**counts, "cells": len(found.cells), "ranking": ranking}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
