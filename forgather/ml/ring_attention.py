"""Causal attention over rows whose positions are divided over ranks, by torch's ring attention.

`ring_attention` takes the queries, keys and values of one rank's positions and gives the attention of these positions
to the whole rows. Keys and values go around the ranks, and each rank merges the results of the blocks that it computed.
The loops, the merging and the order of the positions are torch's (`torch.distributed.tensor.experimental`). What is
here is autograd, the kernel of each device and the sharing of heads of keys and values.

torch's dispatcher knows the kernels of CUDA only. Here the same loops are called with the kernel of the CPU too, which
gives the logarithms of the sums as those of CUDA do. So everything but the kernel of CUDA can be compared with one
process on a CPU, and `ring_error` compares a kernel with attention that is written out, before a run relies on it.

Shapes:
    B rows, T positions of a whole row, S = T / size positions of one rank, H heads, G heads of keys and values, D
    channels of a head.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forgather.errors import DistributedError
from forgather.ring_models import INSTEAD

_PLACES = ("_context_parallel._attention", "_attention")
_USED = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options", "_RotateMethod")
_OPTIONS = ("enable_load_balance", "rotate_method", "convert_to_f32")
_HALVES = 2
"""A rank has one piece from the first half of a row and one from the second, so that all have equally much to do."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The attention of one device that torch's ring can merge.

    Args:
        forward: the operator, which returns the output, the logarithms of the sums, and what its backward pass needs.
        backward: the operator of the backward pass.
        gradient: the name of the gradient of the output among the arguments of `backward`.
        settings: further arguments of `forward`.
        backward_settings: further arguments of `backward`.
        kept: the names, among the arguments of `backward`, of what `forward` returns after the sums.
        piece_multiple: the number that the positions of a piece must be a multiple of.
        channel_multiple: the number that the channels of a head must be a multiple of.
    """

    forward: Callable[..., Sequence[Any]]
    backward: Callable[..., Sequence[Any]]
    gradient: str
    settings: Mapping[str, Any]
    backward_settings: Mapping[str, Any]
    kept: tuple[str, ...] = ()
    piece_multiple: int = 1
    channel_multiple: int = 1


def kernel_of(device_type: str, dtype: torch.dtype) -> Kernel:
    """Returns the attention kernel that torch's ring uses.

    Args:
        device_type: "cpu" or "cuda".
        dtype: the dtype of queries, keys and values.

    Raises:
        DistributedError: FG795 if there is none.
    """
    aten, dropout = torch.ops.aten, {"dropout_p": 0.0}
    if device_type == "cpu":
        return Kernel(
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            "grad_out",
            dropout,
            dropout,
        )
    if device_type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return Kernel(
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_backward.default,
            "grad_out",
            dropout,
            dropout,
            ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
            channel_multiple=8,
        )
    if device_type == "cuda" and dtype == torch.float32:
        return Kernel(
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_efficient_attention_backward.default,
            "grad_out_",
            {"attn_bias": None, "compute_log_sumexp": True, **dropout},
            {"attn_bias": None, "grad_input_mask": (True, True, True, False), **dropout},
            ("philox_seed", "philox_offset"),
            # The kernel extends the sums to a multiple of it, and torch's ring would merge them with other positions.
            piece_multiple=32,
            channel_multiple=4,
        )
    raise DistributedError(
        f"context_parallel_method is 'ring', and torch has no ring attention for {dtype} on {device_type}",
        code="FG795",
        hint=INSTEAD,
    ).about("context_parallel_method")


def piece_multiple(device_type: str) -> int:
    """Returns the number that the positions of each piece must be a multiple of, for every kernel of a device.

    Args:
        device_type: the type of the device that computes.
    """
    # The dtype of a batch is known only when its attention is computed.
    return kernel_of("cuda", torch.float32).piece_multiple if device_type == "cuda" else 1


def own_positions(length: int, rank: int, size: int) -> Tensor:
    """Returns the positions of a row that a rank has: one piece from the first half, and its mirror image.

    Args:
        length: the number of positions of a row, a multiple of twice the number of ranks.
        rank: the rank in its group.
        size: the number of ranks of the group.

    Shapes:
        (S,).

    Example:
        >>> own_positions(8, 0, 2).tolist(), own_positions(8, 1, 2).tolist()
        ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    # As in torch's `_HeadTailLoadBalancer`, which its loops rely on.
    pieces = torch.arange(length).view(_HALVES * size, -1)
    return torch.cat([pieces[rank], pieces[_HALVES * size - 1 - rank]])


def ring_attention(
    query_BHSD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, *, group: Any, rotate_method: str, scale: float | None
) -> Tensor:
    """Returns the causal attention of one rank's positions to the whole rows.

    Collective: every rank of the group must call it, and differentiate it.

    Args:
        query_BHSD: the queries of the rank's positions, which are those of `own_positions`.
        key_BGSD: the keys of the same positions.
        value_BGSD: the values of the same positions.
        group: the process group whose ranks have the parts of the same rows.
        rotate_method: "allgather" if a rank gets the keys and values of all ranks at once; "alltoall" if it gets those
            of one rank at a time.
        scale: what the products of queries and keys are multiplied by; None for 1 / sqrt(D).

    Raises:
        DistributedError: FG795 if torch has no ring attention for these tensors.

    Shapes:
        query_BHSD: (B, H, S, D). key_BGSD, value_BGSD: (B, G, S, D). Returns (B, H, S, D).
    """
    given = query_BHSD, key_BGSD, value_BGSD, group, rotate_method, scale
    output: Tensor = _RingAttention.apply(*given)  # type: ignore[no-untyped-call]
    return output


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, method: str, scale: Any) -> Tensor:
        output: Tensor
        output, sums, *kept = _forward(query, key, value, group, method, scale)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.rest = group, method, scale, kept
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return (*_backward(gradient, *ctx.saved_tensors, *ctx.rest), None, None, None)


def _forward(query: Tensor, key: Tensor, value: Tensor, group: Any, method: str, scale: float | None) -> list[Any]:
    kernel = _fitting_kernel(query)

    def attend(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Sequence[Any]:
        per_key = query.shape[1] // key.shape[1]
        return kernel.forward(query, _repeated(key, per_key), _repeated(value, per_key), **settings)

    settings = {**kernel.settings, "scale": scale}
    with _options(method, query.dtype) as torch_ring:
        return list(
            torch_ring._templated_ring_attention(group, 2, attend, query, key, value, is_causal=True, **settings)
        )


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    group: Any,
    method: str,
    scale: float | None,
    kept: Sequence[Any],
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _fitting_kernel(query)

    def differentiate(*, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> tuple[Any, ...]:
        per_key = query.shape[1] // key.shape[1]
        parts = {"query": query, "key": _repeated(key, per_key), "value": _repeated(value, per_key)}
        of_query, of_key, of_value, *rest = kernel.backward(**parts, **settings)
        return of_query, _added(of_key, per_key), _added(of_value, per_key), *rest

    settings = {**kernel.backward_settings, "scale": scale, **dict(zip(kernel.kept, kept, strict=False))}
    with _options(method, query.dtype) as torch_ring:
        found = torch_ring._templated_ring_attention_backward(
            group,
            2,
            differentiate,
            gradient.contiguous(),
            kernel.gradient,
            query,
            key,
            value,
            output,
            sums,
            is_causal=True,
            **settings,
        )
    return found[0], found[1], found[2]


def _fitting_kernel(query: Tensor) -> Kernel:
    kernel = kernel_of(query.device.type, query.dtype)
    if query.shape[-1] % kernel.channel_multiple or query.shape[-2] % (_HALVES * kernel.piece_multiple):
        raise DistributedError(
            f"context_parallel_method is 'ring', and the kernel for {query.dtype} on {query.device.type} needs heads "
            f"of a multiple of {kernel.channel_multiple} channels and pieces of a multiple of {kernel.piece_multiple} "
            f"positions; a rank has {tuple(query.shape)} (rows, heads, positions, channels)",
            code="FG795",
            hint=INSTEAD,
        ).about("context_parallel_method")
    return kernel


def _repeated(tensor_BGSD: Tensor, per_key: int) -> Tensor:
    """Returns a head of keys or values for each query head: not all kernels share heads."""
    return tensor_BGSD if per_key == 1 else tensor_BGSD.repeat_interleave(per_key, dim=1)


def _added(gradient_BHSD: Tensor, per_key: int) -> Tensor:
    """Returns the gradient of shared heads, added in the precision in which torch's ring adds those of ranks."""
    if per_key == 1:
        return gradient_BHSD
    dtype = torch.float64 if gradient_BHSD.dtype == torch.float64 else torch.float32
    rows, heads, *rest = gradient_BHSD.shape
    added_BGSD: Tensor = gradient_BHSD.reshape(rows, heads // per_key, per_key, *rest).sum(dim=2, dtype=dtype)
    return added_BGSD


@contextlib.contextmanager
def _options(method: str, dtype: torch.dtype) -> Iterator[ModuleType]:
    """Context manager in which the options of torch's ring are those of a call. Its value is torch's module."""
    torch_ring = torch_module()
    options: Any = torch_ring._cp_options
    before = dict(vars(options))
    methods = {"allgather": torch_ring._RotateMethod.ALL_GATHER, "alltoall": torch_ring._RotateMethod.ALL_TO_ALL}
    options.enable_load_balance = True
    options.rotate_method = methods[method]
    # torch's ring merges in float32, which would round float64.
    options.convert_to_f32 = dtype != torch.float64
    try:
        yield torch_ring
    finally:
        vars(options).update(before)


@functools.cache
def torch_module() -> ModuleType:
    """Returns the module of torch that has ring attention.

    Raises:
        DistributedError: FG795 if this version of torch has none, or has it in another form.
    """
    for place in _PLACES:
        with contextlib.suppress(ImportError):
            module = import_module(f"torch.distributed.tensor.experimental.{place}")
            # Earlier versions take a mesh, or have other options.
            if all(hasattr(module, name) for name in _USED) and _is_known(module):
                return module
    raise DistributedError(
        f"context_parallel_method is 'ring', and torch {torch.__version__} has no {_USED[0]} that is known",
        code="FG795",
        hint=f"{INSTEAD}, or install torch 2.13",
    ).about("context_parallel_method")


def _is_known(module: ModuleType) -> bool:
    functions = (module._templated_ring_attention, module._templated_ring_attention_backward)
    firsts = [list(inspect.signature(function).parameters)[:3] for function in functions]
    options = all(hasattr(module._cp_options, name) for name in _OPTIONS)
    return options and firsts == [["group", "seq_dim", "op"]] * 2


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What an attention kernel depends on, except for the lengths.

    Args:
        device: the device.
        dtype: the dtype of queries, keys and values.
        heads: the number of query heads.
        groups: the number of heads of keys and values.
        channels: the number of channels of a head.
        scale: what the products of queries and keys are multiplied by; None for 1 / sqrt(channels).
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    channels: int
    scale: float | None


def kind_of(query_BHSD: Tensor, key_BGSD: Tensor, scale: float | None) -> AttentionKind:
    """Returns the kind of an attention.

    Args:
        query_BHSD: its queries.
        key_BGSD: its keys.
        scale: as for `ring_attention`.

    Shapes:
        query_BHSD: (B, H, S, D). key_BGSD: (B, G, S, D).
    """
    heads, channels = query_BHSD.shape[1], query_BHSD.shape[3]
    return AttentionKind(query_BHSD.device, query_BHSD.dtype, heads, key_BGSD.shape[1], channels, scale)


def ring_error(kind: AttentionKind, *, group: Any, rotate_method: str) -> Tensor:
    """Returns how far ring attention is from attention over whole rows, on small random rows.

    The output and the three gradients are compared with attention that is written out in float64.

    Collective: every rank of the group must call it.

    Args:
        kind: the attention to compare.
        group: the process group of the ranks.
        rotate_method: as for `ring_attention`.

    Shapes:
        Returns a scalar: the largest relative error of the four tensors on all ranks.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    length = _HALVES * size * max(4, piece_multiple(kind.device.type))
    # A generator of its own: a run must draw the same numbers with and without the comparison.
    draws = torch.Generator().manual_seed(length)
    shapes = [(1, number, length, kind.channels) for number in (kind.heads, kind.groups, kind.groups, kind.heads)]
    whole = [torch.randn(shape, generator=draws, dtype=torch.float64).to(kind.device, kind.dtype) for shape in shapes]
    mine = own_positions(length, rank, size).to(kind.device)
    query, key, value, gradient = (tensor[:, :, mine].contiguous() for tensor in whole)
    output, sums, *kept = _forward(query, key, value, group, rotate_method, kind.scale)
    found = output, *_backward(gradient, query, key, value, output, sums, group, rotate_method, kind.scale, kept)
    scale = kind.channels**-0.5 if kind.scale is None else kind.scale
    expected = _written_out(*(tensor.double() for tensor in whole), scale=scale)
    errors = [
        (one.double() - other[:, :, mine]).norm() / other.norm() for one, other in zip(found, expected, strict=True)
    ]
    error = torch.stack(errors).max()
    dist.all_reduce(error, dist.ReduceOp.MAX, group)
    return error


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns causal attention and its gradients for queries, keys and values, by their formulas."""
    per_key = query.shape[1] // key.shape[1]
    key, value = _repeated(key, per_key), _repeated(value, per_key)
    length = query.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    weights = (query @ key.mT * scale).masked_fill(hidden, -torch.inf).softmax(dim=-1)
    output = weights @ value
    of_weights = gradient @ value.mT
    of_products = weights * (of_weights - (of_weights * weights).sum(dim=-1, keepdim=True)) * scale
    of_key, of_value = of_products.mT @ query, weights.mT @ gradient
    return output, of_products @ key, _added(of_key, per_key), _added(of_value, per_key)
