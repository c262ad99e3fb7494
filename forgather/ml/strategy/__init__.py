"""Strategies: how one optimizer step is computed. The training loop holds one strategy and does not know which.

Importing the package does not import torch; the first access to a name does. A check before a run can therefore read
what the settings of a strategy mean.
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
