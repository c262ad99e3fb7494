"""What operators of a library allocate inside of themselves.

A trace sees an operator of bitsandbytes as one call, and its fake version makes the result only. On a CPU, the library
computes many of them by operators of torch: a product with a weight of 4 bits dequantizes the whole weight, and a step
of an optimizer with a state of 8 bits dequantizes the state of a weight. `kernel_of` gives the library's own function,
which the recorder runs in place of the operator. On a GPU, the kernels of optimizers allocate nothing.

Source:
    `bitsandbytes.backends` in bitsandbytes 0.50; `gemm_4bit` of its CUDA backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

_PRODUCT = "bitsandbytes.gemm_4bit"
_STEPS = "bitsandbytes.optimizer_update_"
_KERNELS = {
    _PRODUCT: "bitsandbytes.backends.default.ops:_gemm_4bit_default_impl",
    f"{_STEPS}32bit": "bitsandbytes.backends.cpu.ops:_optimizer_update_32bit_cpu",
    f"{_STEPS}8bit_blockwise": "bitsandbytes.backends.cpu.ops:_optimizer_update_8bit_blockwise_cpu",
}
_FUSED_TOKENS = 4
"""A GPU multiplies the hidden states of so few tokens by a weight of 4 bits without dequantizing the whole weight."""


_CONVOLUTIONS = "workspaces of convolutions are those of oneDNN with the registers and the threads of this machine"
_CONVOLUTIONS_OF_GPU = (
    "no row counts cuDNN's workspaces of convolutions: they are assumed, between none and a copy of what the largest "
    "convolution reads and writes"
)


def kernel_of(name: str, args: Any, device_type: str) -> Callable[..., Any] | None:
    """Returns the function of the library by which an operator computes; None if it allocates its result only.

    Args:
        name: the name of the operator, such as "bitsandbytes.gemm_4bit".
        args: its positional arguments.
        device_type: the kind of device that is planned for, "cpu" or "cuda".
    """
    place = _KERNELS.get(name)
    if place is None or (device_type != "cpu" and (name != _PRODUCT or _num_tokens(args[0]) <= _FUSED_TOKENS)):
        return None
    return _found(place)


def kernel_notes(local: nn.Module, optimizer: Any, device_type: str) -> Iterator[str]:
    """Yields what a trace does not count of kernels of libraries, one sentence each.

    Args:
        local: the part of the model on this rank.
        optimizer: the optimizer of the run.
        device_type: the kind of device that is planned for.
    """
    if any(isinstance(module, _ConvNd) for module in local.modules()):
        yield _CONVOLUTIONS if device_type == "cpu" else _CONVOLUTIONS_OF_GPU
    layers = {type(module).__name__ for module in local.modules() if type(module).__module__.startswith("bitsandbytes")}
    steps = type(getattr(optimizer, "optimizer", optimizer)).__module__.startswith("bitsandbytes")
    if device_type == "cpu":
        if (layers or steps) and not all(map(_found, _KERNELS.values())):
            yield "this version of bitsandbytes has other kernels, and what they allocate inside is not counted"
        return
    if "Linear4bit" in layers:
        yield (
            "weights of 4 bits are planned as dequantized for each product, one at a time; many GPUs compute products "
            "of few tokens (at most 1,536) without that"
        )
    if "Linear8bitLt" in layers:
        yield "weights of 8 bits are planned with the products of a CPU, which dequantize a weight; GPUs do not"


def _num_tokens(states: Any) -> int:
    return int(states.numel() // states.shape[-1])


def _found(place: str) -> Callable[..., Any] | None:
    module, _, name = place.partition(":")
    # An operator exists only if its library was imported, and the model of a run without it has none of its layers.
    if module.partition(".")[0] not in sys.modules:
        return None
    found: Callable[..., Any] | None = getattr(import_module(module), name, None)
    return found
