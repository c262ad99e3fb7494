"""The monitors of a script, under the names of `forgather.ml.callbacks`.

Each name is imported on first access, because the classes need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather.ml.callbacks import MemoryProfiler, TrainingMonitor

__all__ = ["MemoryProfiler", "TrainingMonitor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("forgather.ml.callbacks"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
