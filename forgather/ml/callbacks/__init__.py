"""Trainer callbacks that handle the events of transformers; each callback has a module.

Each public name imports its module when the name is first used, so the packages that a callback needs (rich,
tensorboard) are imported only for that callback.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "MemoryProfiler": "memory_profiler",
    "ProfileCallback": "profile",
    "DistributedMonitorCallback": "rank_monitor",
    "ResourceMonitorCallback": "monitor",
    "TrainingMonitor": "monitor",
    "AnomalyCallback": "anomaly",
    "CallbackDispatcher": "dispatch",
    "JsonLogger": "metrics",
    "ProgressCallback": "progress",
    "RunSummaryCallback": "summary",
    "SpeedCallback": "speed",
    "TBLogger": "tensorboard",
    "TextSampleCallback": "text_sample",
    "TrainerCallback": "base",
    "TrainerControl": "base",
    "TrainerState": "base",
}

__all__ = sorted(_LAZY)  # noqa: PLE0605


# PEP 562: a config without TensorBoard must not need the package.
def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
