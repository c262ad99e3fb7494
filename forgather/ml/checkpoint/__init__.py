"""Checkpoints: safetensors and JSON, complete or invisible, verified when they are read."""

from __future__ import annotations

from forgather.ml.checkpoint.lineage import newest_verified
from forgather.ml.checkpoint.retention import prune
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.checkpoint.state import read_state, write_state
from forgather.ml.checkpoint.store import (
    checkpoint_folder,
    list_checkpoints,
    verify,
    write_checkpoint,
)

__all__ = [
    "capture_rng",
    "checkpoint_folder",
    "list_checkpoints",
    "newest_verified",
    "prune",
    "read_state",
    "restore_rng",
    "verify",
    "write_checkpoint",
    "write_state",
]
