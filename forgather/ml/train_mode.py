"""Context managers for the training and evaluation modes of modules, and for generation during a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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


@contextmanager
def sampling_mode(model: nn.Module, seed: int) -> Iterator[None]:
    """Context manager that puts `model` into eval mode, seeds torch, and switches gradients and compiled code off.

    The train or eval mode of each module and the random states are restored at the end.

    Args:
        model: the model without wrappers.
        seed: the seed of the random generators of the CPU and of the model's CUDA devices.
    """
    # Devices by name: by default `fork_rng` saves the state of every visible device.
    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"})
    # Each length of a text and each state of a cache would be compiled. After eight of them torch gives up on the code,
    # and the training would go on without it.
    eager = torch.compiler.set_stance("force_eager")
    with restored_train_modes(model), torch.random.fork_rng(devices=devices), torch.no_grad(), eager:
        model.eval()
        # `torch.manual_seed` would also seed devices that `fork_rng` does not restore.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
