"""File names of checkpoints and model folders, and which part of the training state each file holds.

Every name is defined here only. The module does not import torch, so commands that only list folders use the same
names as the code that writes them.
"""

from __future__ import annotations

import json
from typing import Any

MODEL, SLICES, EXTRA_STATE = "model", "weights", "model_extra_state"
"""File name stems of whole weights (as `from_pretrained` expects), sharded weights and non-tensor model state."""

WEIGHTS, WEIGHTS_INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
"""The files that `from_pretrained` looks for in a folder."""

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files that peft looks for in a folder."""

INDEX = "index.json"
"""The file that maps each tensor of a checkpoint to the file and key of each of its chunks."""

TRAINER_STATE, TRAINING_ARGS = "trainer_state.json", "training_args.json"
"""Progress of the run and its arguments, in the layout of transformers; people and tools of transformers read them."""

TRAINING_STATE = "training_state"
"""Stem of the files that hold the LR schedule, the data position, the random states and the loss meter."""

OPTIMIZER, SCHEDULE, DATA, RNG, METER, PROGRESS = "optimizer", "schedule", "data", "rng", "meter", "progress"
"""The parts of a checkpoint next to the weights, by the names that `--allow-missing` accepts."""

IN_TRAINING_STATE = (SCHEDULE, DATA, RNG, METER)
BESIDE_A_MODEL = (OPTIMIZER, *IN_TRAINING_STATE)
"""The parts that a checkpoint with `save_only_model` does not have."""

CUSTOM = "custom"
"""The folder that holds the files of a user's `save_function`."""


def parts_in(name: str) -> tuple[str, ...]:
    """Returns the parts of the training state in a checkpoint file; empty for a file that a resume always needs."""
    if name == TRAINER_STATE:
        return (PROGRESS,)
    # With the dot, so that `training_state.json` and `training_state.safetensors` match and nothing else.
    if name.startswith(f"{TRAINING_STATE}."):
        return IN_TRAINING_STATE
    return (OPTIMIZER,) if name.startswith(OPTIMIZER) else ()


def as_json(value: Any) -> bytes:
    """Returns JSON-compatible data as the bytes of an indented JSON file."""
    return (json.dumps(value, indent=1) + "\n").encode()
