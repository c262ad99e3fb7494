"""Training mode of modules, module by module.

Takes a model, gives it back as it was. Keeps true: a module that the user put into evaluation mode by itself (a frozen
normalization) is still in it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Runs its body, and gives each module of `model` the mode that it had before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
