"""The trainers from Python: a script gives a model and a mapping of words, and each class does what a config would.

Each name is imported on first access, so that `import forgather.distributed` imports neither torch nor the stages of a
config.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather.distributed.checkpoint import CheckpointManager
    from forgather.distributed.data_loader import DistributedDataLoader
    from forgather.distributed.monitor import MemoryProfiler, TrainingMonitor
    from forgather.distributed.notebook import launch_in_notebook
    from forgather.distributed.parallel import (
        ModelParallel,
        PipelineParallel,
        TensorParallel,
        register_custom_kernel,
    )
    from forgather.distributed.trainer import DistributedTrainer, setup_distributed_training

__all__ = [
    "CheckpointManager",
    "DistributedDataLoader",
    "DistributedTrainer",
    "MemoryProfiler",
    "ModelParallel",
    "PipelineParallel",
    "TensorParallel",
    "TrainingMonitor",
    "launch_in_notebook",
    "register_custom_kernel",
    "setup_distributed_training",
]

_LAZY = {
    "CheckpointManager": "checkpoint",
    "DistributedDataLoader": "data_loader",
    "DistributedTrainer": "trainer",
    "MemoryProfiler": "monitor",
    "ModelParallel": "parallel",
    "PipelineParallel": "parallel",
    "TensorParallel": "parallel",
    "TrainingMonitor": "monitor",
    "launch_in_notebook": "notebook",
    "register_custom_kernel": "parallel",
    "setup_distributed_training": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
