"""Strategies, which compute the optimizer steps of the training loop on one or several processes.

The training loop has one strategy and does not depend on its kind. Importing this package does not import torch: torch
is imported with the first access to one of the names. A check before a run can therefore read the settings of a
strategy without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather.ml.strategy.base import Recipe, Strategy
    from forgather.ml.strategy.single import SingleDevice

__all__ = ["Recipe", "SingleDevice", "Strategy"]

_LAZY = {
    "Recipe": "forgather.ml.strategy.base",
    "SingleDevice": "forgather.ml.strategy.single",
    "Strategy": "forgather.ml.strategy.base",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
