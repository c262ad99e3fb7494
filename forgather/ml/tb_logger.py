"""`forgather.ml.tb_logger:TBLogger`: the public name of the TensorBoard callback."""

from forgather.ml.callbacks.tensorboard import TBLogger

__all__ = ["TBLogger"]
