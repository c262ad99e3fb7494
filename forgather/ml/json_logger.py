"""The dotted name under which configurations know the JSON lines callback."""

from forgather.ml.callbacks.metrics import JsonLogger

__all__ = ["JsonLogger"]
