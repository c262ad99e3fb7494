"""The dotted name under which configurations know the TensorBoard callback."""

from forgather.ml.callbacks.tensorboard import TBLogger

__all__ = ["TBLogger"]
