"""The kernels of attention that a GPU takes, for a trace whose tensors are on the CPU.

A CPU has a fused kernel without dropout, and computes all scores otherwise. A GPU has one for half precision without a
mask, and one that takes masks, dropout and 32 bits, but no grouped queries and no transposed mask. `GpuAttention` makes
the trace keep what these keep: the scores only where neither of them fits.

Source:
    `can_use_flash_attention` and `can_use_mem_efficient_attention` in torch's `sdp_utils.cpp` of CUDA. Measured on an
    H100, see docs/planner_on_gpus.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

_WITHOUT_SCORES = (
    "attention with a mask or dropout is planned as torch's memory-efficient kernel computes it on a GPU, which keeps "
    "no scores"
)
_WITH_SCORES = "attention with grouped queries keeps all scores in 32 bits or with a mask: torch has no such GPU kernel"
_OF_LAYOUT = (
    "attention whose mask is transposed, or whose heads have a width that is not a multiple of 16 bytes, keeps all "
    "scores: torch has no such GPU kernel"
)
_OF_FLASH = (
    "attention with grouped queries is planned with torch's flash kernel, as on an A100 and newer GPUs: V100 and T4 "
    "have none, and keep all scores"
)
_WIDEST = 256  # elements of a head
_ALIGNMENT = 16  # bytes of a head, of which its width must be a multiple


class GpuAttention:
    """Context manager in which torch's attention takes the path of a GPU.

    Args:
        device_type: the kind of device that is planned for. Nothing changes for "cpu".
    """

    def __init__(self, device_type: str) -> None:
        self._is_active = device_type != "cpu"
        self._said: dict[str, None] = {}
        self._kept: Any = None

    def notes(self) -> Iterator[str]:
        """Yields what is assumed about the attention that was computed, one sentence each."""
        yield from self._said

    def __enter__(self) -> GpuAttention:
        self._kept = functional.scaled_dot_product_attention
        if self._is_active:
            functional.scaled_dot_product_attention = self._attend
        return self

    def __exit__(self, *error: object) -> None:
        functional.scaled_dot_product_attention = self._kept

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Stands for `scaled_dot_product_attention`."""
        takes_mask = not enable_gqa or query.shape[-3] == key.shape[-3]
        computes_in = _computes_in(query)
        is_flash = attn_mask is None and computes_in is not torch.float32 and query.shape[-1] <= _WIDEST
        is_aligned = all(one.shape[-1] * computes_in.itemsize % _ALIGNMENT == 0 for one in (query, value)) and (
            attn_mask is None or attn_mask.stride(-1) == 1
        )
        settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if not is_flash and not (takes_mask and is_aligned):
            self._said[_OF_LAYOUT if takes_mask else _WITH_SCORES] = None
            with sdpa_kernel(SDPBackend.MATH):
                return self._kept(query, key, value, attn_mask, dropout_p, **settings)
        if is_flash and not takes_mask:
            self._said[_OF_FLASH] = None
        if attn_mask is not None or dropout_p:
            self._said[_WITHOUT_SCORES] = None
        # A fused kernel keeps the seed of dropout, and gives a mask its gradient. That of the CPU does neither.
        found = self._kept(query, key, value, None if attn_mask is None else attn_mask.detach(), 0.0, **settings)
        if attn_mask is not None and attn_mask.requires_grad:
            return _WithGradientOfMask.apply(found, attn_mask, (*query.shape[:-1], key.shape[-2]))  # type: ignore[no-untyped-call]
        return found


class _WithGradientOfMask(torch.autograd.Function):
    """Returns the result of attention unchanged; the backward pass allocates a gradient of all scores for the mask."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape, ctx.mask_shape, ctx.dtype = shape, mask.shape, mask.dtype
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        of_scores = grad.new_zeros(ctx.shape)
        return grad, of_scores.sum_to_size(ctx.mask_shape).to(ctx.dtype), None


def _computes_in(query: Tensor) -> torch.dtype:
    """Returns the dtype that attention computes in: autocast casts its inputs, on a CPU as on a GPU."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
