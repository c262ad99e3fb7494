"""Strategies: how one update is computed. The loop holds one and does not know which."""

from __future__ import annotations

from forgather.ml.strategy.base import Recipe, Strategy
from forgather.ml.strategy.single import SingleDevice

__all__ = ["Recipe", "SingleDevice", "Strategy"]
