"""Whether a model is part of a plan or a dry run, in which shapes are followed and nothing is computed."""

from __future__ import annotations

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from forgather.ml.distributed.collectives import is_multi_process, is_simulated


def is_planned(model: nn.Module) -> bool:
    """Returns whether the weights of a model are fake tensors, or the other processes of its run are simulated.

    Args:
        model: the model.
    """
    fake = any(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    return fake or (is_multi_process() and is_simulated())
