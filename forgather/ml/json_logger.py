"""`forgather.ml.json_logger:JsonLogger`: the public name of the callback that writes metrics as JSON lines."""

from forgather.ml.callbacks.metrics import JsonLogger

__all__ = ["JsonLogger"]
