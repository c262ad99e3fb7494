"""The public dotted name of the simulation of pipeline schedules, which scripts use."""

from forgather.ml.strategy.pipeline.bubble_simulation import simulate

__all__ = ["simulate"]
