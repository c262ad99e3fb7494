"""Restoring the training and evaluation modes of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def restored_train_modes(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the training or evaluation mode of each module at its end.

    Calling `model.train()` instead would also change modules that the user put into evaluation mode, such as frozen
    norms.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
