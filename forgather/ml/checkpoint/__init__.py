"""Writes and reads checkpoints as safetensors and JSON files, which are verified when they are read.

A checkpoint folder gets its final name only when it is complete. Importing this package does not import torch: each
public name imports the module that defines it when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather.ml.checkpoint.checkpoint_dir import checkpoint_folder, list_checkpoints, write_checkpoint
    from forgather.ml.checkpoint.lineage import newest_verified
    from forgather.ml.checkpoint.manifest import verify
    from forgather.ml.checkpoint.retention import Retention, prune
    from forgather.ml.checkpoint.rng import capture_rng, restore_rng
    from forgather.ml.checkpoint.state import read_state, write_state
    from forgather.ml.checkpoint.storage import LocalStorage, Storage

__all__ = [
    "LocalStorage",
    "Retention",
    "Storage",
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

_LAZY = {
    "LocalStorage": "storage",
    "Retention": "retention",
    "Storage": "storage",
    "capture_rng": "rng",
    "checkpoint_folder": "checkpoint_dir",
    "list_checkpoints": "checkpoint_dir",
    "newest_verified": "lineage",
    "prune": "retention",
    "read_state": "state",
    "restore_rng": "rng",
    "verify": "manifest",
    "write_checkpoint": "checkpoint_dir",
    "write_state": "state",
}


# PEP 562: `fgcli ckpt list` and similar commands only look at folders and must not pay for importing torch.
def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
