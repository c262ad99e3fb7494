"""The files of a checkpoint and of a model folder: their names, and the parts of a run that lie in them.

Takes nothing; gives names. Keeps true: each name is written here alone, and no torch is imported, so that whoever only
looks at folders knows the same names as whoever writes them.
"""

from __future__ import annotations

import json
from typing import Any

MODEL, SLICES, EXTRA_STATE = "model", "weights", "model_extra_state"
"""Stems of the files of weights: whole ones, as `from_pretrained` knows them, slices, and what is no tensor."""

WEIGHTS, WEIGHTS_INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
"""What `from_pretrained` looks for in a folder."""

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What peft looks for in a folder."""

INDEX = "index.json"
"""Where each tensor of a checkpoint lies."""

TRAINER_STATE, TRAINING_ARGS = "trainer_state.json", "training_args.json"
"""How far a run was, and its arguments, for people and for tools of transformers."""

TRAINING_STATE = "training_state"
"""Stem of the files that hold schedule, position in the data, random states and mean loss."""

OPTIMIZER, SCHEDULE, DATA, RNG, METER, PROGRESS = "optimizer", "schedule", "data", "rng", "meter", "progress"
"""The parts of a checkpoint beside the weights, as `--allow-missing` names them."""

IN_TRAINING_STATE = (SCHEDULE, DATA, RNG, METER)
BESIDE_A_MODEL = (OPTIMIZER, *IN_TRAINING_STATE)
"""The parts that a checkpoint of the model alone lacks."""

CUSTOM = "custom"
"""Folder of what a `save_function` wrote."""


def parts_in(name: str) -> tuple[str, ...]:
    """Returns the parts that lie in a file of a checkpoint; none for one that a run cannot do without.

    Example:
        >>> parts_in("optimizer.json"), parts_in("trainer_state.json"), parts_in("model.safetensors")
        (('optimizer',), ('progress',), ())
    """
    if name == TRAINER_STATE:
        return (PROGRESS,)
    if name.startswith(f"{TRAINING_STATE}."):
        return IN_TRAINING_STATE
    return (OPTIMIZER,) if name.startswith(OPTIMIZER) else ()


def as_json(value: Any) -> bytes:
    """Returns plain data as the text of a file."""
    return (json.dumps(value, indent=1) + "\n").encode()
