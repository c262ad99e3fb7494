"""Attention of packed rows by the lengths of their documents, without a mask: `attn_implementation: varlen`.

`varlen_attention` is an attention function of transformers. `AttentionInputs` gives it the borders of the documents of
a batch (`cu_seq_lens_q`), and each document attends to itself alone. A batch without borders is computed as by `sdpa`,
with the masks of `sdpa`.

The flash attentions of transformers take the same borders. `FLASH` are their names; within `expecting_borders` they
refuse to compute without borders, which would let tokens see other documents.

On a GPU, in bfloat16 or float16 and without dropout, it calls `torch.nn.attention.varlen.varlen_attn` (not measured:
no GPU has run it). Otherwise it calls the attention of `sdpa` for one document after the other, which is exact on any
device, and slow for many short documents.

Shapes:
    B rows, T positions, N = B * T, H heads, G heads of keys, K features of a head, L tokens of a document, D documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from forgather.errors import TrainingError

VARLEN = "varlen"
"""The name of the attention implementation."""
FLASH = tuple(f"flash_attention_{number}" for number in (2, 3, 4))
"""The names of the attention implementations of transformers that take borders."""
_HALF = (torch.bfloat16, torch.float16)


class _Expected:
    """Whether the forward pass that is running was given the borders of documents."""

    borders = False


_expected = _Expected()


@contextlib.contextmanager
def expecting_borders() -> Iterator[None]:
    """Context manager in which each attention must be given the borders of documents, and no mask is made."""
    before, _expected.borders = _expected.borders, True
    try:
        yield
    finally:
        _expected.borders = before


def _mask(*args: Any, **keywords: Any) -> Tensor | None:
    if _expected.borders:
        return None
    found: Tensor | None = sdpa_mask(*args, **keywords)
    return found


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Returns the attention of each token to its own document, as attention functions of transformers do.

    Args:
        module: the attention layer.
        query: the queries.
        key: the keys.
        value: the values.
        attention_mask: the mask of a batch without borders.
        dropout: the probability with which attention weights are dropped.
        scaling: the factor of the products of queries and keys.
        sliding_window: the number of tokens, up to its own, that a token sees; None for all of them.
        cu_seq_lens_q: the borders of the documents of all rows, one row after the other.
        max_length_q: the length of the longest document.
        **keywords: further arguments of `sdpa`.

    Shapes:
        query: (B, H, T, K); key, value: (B, G, T, K); attention_mask: (B, 1, T, T); cu_seq_lens_q: (D + 1,). Returns
            (B, T, H, K) and None.

    Raises:
        TrainingError: FG714 if the model does not pass the borders on to its attention.
    """
    options = {"dropout": dropout, "scaling": scaling, **keywords}
    if cu_seq_lens_q is None or max_length_q is None:
        _refuse_without_borders(module)
        found: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
        return found, None
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    if query.is_cuda and query.dtype in _HALF and not dropout and _is_plain(module, keywords):
        return _by_kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, window), None
    return _document_by_document(module, (query, key, value), cu_seq_lens_q, window, options), None


def _refuse_without_borders(module: nn.Module) -> None:
    if _expected.borders:
        raise TrainingError(
            f"the rows hold several documents, and the model does not pass their borders (cu_seq_lens_q) on to "
            f"{type(module).__name__}",
            code="FG714",
            hint="set attn_implementation: sdpa",
        )


def flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """Returns what the flash attention of transformers returns, if it is given the borders that are expected.

    Args:
        module: the attention layer, whose configuration names the library.
        query: one query for each position and head.
        key: the keys, of as many heads or fewer.
        value: the values.
        attention_mask: the places that are no padding; None if there is none.
        **keywords: further arguments of transformers' function.

    Shapes:
        query: (B, H, T, K). key, value: (B, G, T, K). attention_mask: (B, T). Returns (B, T, H, K) and None.

    Raises:
        TrainingError: FG714 if the model does not pass the borders on to its attention.
    """
    if keywords.get("cu_seq_lens_q") is None:
        _refuse_without_borders(module)
    found: tuple[Tensor, None] = flash_attention_forward(module, query, key, value, attention_mask, **keywords)
    return found


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    B, H, T, _ = query.shape
    flat_query, flat_key, flat_value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    output: Any = varlen_attn(
        flat_query,
        flat_key,
        flat_value,
        borders,
        borders,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != H,
    )
    found: Tensor = output.view(B, T, H, -1)
    return found


def _document_by_document(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    borders: Tensor,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    B, H, T, _ = tensors[0].shape
    lengths = borders.diff().tolist()
    # Of all rows one after the other: (1, heads, N, K).
    rows = (tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for tensor in tensors)
    documents = zip(*(torch.split(tensor, lengths, dim=2) for tensor in rows), strict=True)
    parts = [
        sdpa_attention_forward(module, queries, keys, values, _window_mask(queries, window), **options)[0]
        for queries, keys, values in documents
    ]
    return torch.cat(parts, dim=1).view(B, T, H, -1)


def _is_plain(module: nn.Module, keywords: dict[str, Any]) -> bool:
    is_causal = keywords.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return bool(is_causal) and not any(keywords.get(name) for name in ("softcap", "position_bias"))


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """Returns the mask of a document that is longer than a sliding window, or None.

    Shapes:
        query: (1, H, L, K). Returns (1, 1, L, L), or None.
    """
    length = query.shape[2]
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)[None, None]


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, _mask)
for _name in FLASH:
    if AttentionInterface._global_mapping.get(_name) is flash_attention_forward:
        AttentionInterface.register(_name, flash_attention)
