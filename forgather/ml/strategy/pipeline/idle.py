"""The dotted name under which scripts know the simulation of schedules."""

from forgather.ml.strategy.pipeline.bubble_simulation import simulate

__all__ = ["simulate"]
