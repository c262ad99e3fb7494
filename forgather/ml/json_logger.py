"""`forgather.ml.json_logger:JsonLogger`: the public name of the JSON lines callback."""

from forgather.ml.callbacks.metrics import JsonLogger

__all__ = ["JsonLogger"]
