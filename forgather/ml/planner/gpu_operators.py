"""What operators compute on a GPU in place of a CPU, for a trace whose tensors are on the CPU.

Under autocast, a GPU computes norms, softmax, powers, sums and others in 32 bits, and a CPU does so for fewer of them.
Dropout keeps a mask of one byte for each element on a GPU, and factors of the dtype of its input on a CPU.
`gpu_operators` makes a trace keep what a GPU keeps.

Source:
    torch's table of kernels says which operators autocast treats on a GPU and not on a CPU; the kinds of treatment are
    those of `autocast_mode.h`. `at::dropout` takes `native_dropout` for tensors on a GPU. Measured on an H100, see
    docs/planner_on_gpus.md.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_LOWERED = frozenset(
    "_convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addmv addr "
    "chain_matmul convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot lstm_cell "
    "mv rnn_relu_cell rnn_tanh_cell".split()
)
"""Operators that a GPU computes in the lower precision. Most consist of others, which a CPU treats alike."""

_PROMOTED = frozenset("addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot vdot".split())
"""Operators whose inputs get the widest dtype among them, as torch's operators do by themselves on a CPU."""

_WITH_DTYPE = frozenset(
    "cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int softmax.int sum "
    "sum.dim_IntList".split()
)
"""Operators that read the lower precision and return 32 bits: they have an argument `dtype`, which autocast sets."""

_HALVES = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def gpu_operators(device_type: str) -> Iterator[None]:
    """Context manager in which dropout, and operators under autocast, keep what they keep on a GPU.

    Args:
        device_type: the kind of device that is planned for. Nothing changes for "cpu".
    """
    if device_type == "cpu":
        yield
        return
    library: Any = torch.library.Library
    autocast, autograd = (library("aten", "IMPL", key) for key in ("AutocastCPU", "AutogradCPU"))
    try:
        for name in widened():
            autocast.impl(name, functools.partial(_compute, _operator(name), name in _WITH_DTYPE))
        autograd.impl("dropout", _drop)
        yield
    finally:
        autocast._destroy()
        autograd._destroy()


@functools.cache
def widened() -> list[str]:
    """Returns the names of the operators that autocast computes in 32 bits on a GPU, and leaves alone on a CPU."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "AutocastCUDA") and not has_kernel(name, "AutocastCPU")
    ]
    return sorted(set(found) - _LOWERED - _PROMOTED)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _compute(operator: Any, takes_dtype: bool, *args: Any, **kwargs: Any) -> Any:
    """Computes an operator in 32 bits."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        if not takes_dtype:
            args, kwargs = tree_map(_widen, (args, kwargs))
        elif kwargs.get("dtype") is None and _is_half(args[0]) and not _gives_dtype(operator, args):
            kwargs = {**kwargs, "dtype": torch.float32}
        return operator(*args, **kwargs)


def _widen(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALVES


def _gives_dtype(operator: Any, args: tuple[Any, ...]) -> bool:
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("dtype")
    return len(args) > place and args[place] is not None


def _drop(input: Tensor, p: float, train: bool) -> Tensor:
    """Stands for `torch.dropout`."""
    if not train or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
