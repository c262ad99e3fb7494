"""Attention masks of transformers without a look at the device.

In every forward, transformers reads the batch to decide whether a mask is needed: whether positions restart, and
whether a padding mask is all ones. Each read waits for the device, and while `torch.compile` traces, transformers makes
a mask of shape (B, 1, T, T) because it cannot read. `AttentionInputs` takes a model and the `Documents` of a batch,
which the host knows before the batch is moved. During a call, transformers' questions are answered from them, so that
transformers' own code makes the same masks as before:

* A batch of one document a row without padding has no mask under sdpa, in eager mode and compiled.
* A mask that is all ones is not passed to the model.
* Packed and padded rows have the mask that transformers makes for them. With `attn_implementation: varlen`, packed rows
  have no mask: the attention is given the borders of the documents (see `varlen_attention`). So are the flash
  attentions of transformers, which would read positions from the device otherwise, and those of single rows only.

`AttentionInputs.left_alone` is the reason why a model keeps transformers' own detection, or None. The answer "no
position restarts" would let tokens see other documents if a model chose positions by itself, and models may read more
from a mask than what it hides. So the answers are given only to unchanged classes of transformers of which
`attention_models.json` records, measured by `scripts/measure_attention_inputs.py`, that no bit of the logits differs.

Shapes:
    B rows, T positions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from forgather.ml.documents import Documents, why_mixed
from forgather.ml.varlen_attention import FLASH, VARLEN, expecting_borders

_MASKS = ("attention_mask", "decoder_attention_mask")
_TABLE = Path(__file__).parent / "attention_models.json"
_NOTHING_TO_DO = contextlib.nullcontext()
# What is replaced, with the parameters that the replacements rely on.
_REPLACED = {
    "find_packed_sequence_indices": ["position_ids"],
    "_ignore_causal_mask_sdpa": [
        *("padding_mask", "q_length", "kv_length", "q_offset", "kv_offset"),
        "local_attention_size",
    ],
    "_ignore_bidirectional_mask_sdpa": ["padding_mask", "kv_length", "local_attention_size"],
    "fast_all": ["tensor"],
}


class _Answers:
    """What the host knows of the batch of the forward pass that is running; None where it does not know.

    torch.compile guards the values, so that a compiled model is compiled once for each of them.
    """

    are_packed: bool | None = None
    are_padded: bool | None = None


_answers = _Answers()


class AttentionInputs:
    """Answers transformers' questions about the masks of a batch, for one model.

    Args:
        model: the model, before it is wrapped for distributed training.
    """

    def __init__(self, model: nn.Module) -> None:
        self.left_alone = why_left_alone(model)
        self.takes_borders = self.left_alone is None and _takes_borders(model)
        """Whether the attention of packed rows is given the borders of their documents."""
        if self.left_alone is None:
            _replace_detection()

    def in_force(self, documents: Documents | None) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager in which the masks of a forward pass are decided on the host.

        Args:
            documents: the documents of the batch; None if nothing is known.
        """
        if documents is None or self.left_alone is not None:
            return _NOTHING_TO_DO
        takes_borders = self.takes_borders and documents.are_packed
        return _answering(documents.are_packed, documents.are_padded, takes_borders=takes_borders)

    def completed(self, inputs: Mapping[str, Any], documents: Documents | None) -> Mapping[str, Any]:
        """Returns the inputs of a model without masks that hide nothing, and with the borders of packed documents.

        Args:
            inputs: the inputs of the model.
            documents: the documents of the batch; None if nothing is known.
        """
        if documents is None or self.left_alone is not None:
            return inputs
        if documents.are_packed:
            # Next to a mask, transformers ignores positions. Models that were to mix documents must go on to do so.
            return {**inputs, **_borders(inputs, documents)} if self.takes_borders else inputs
        if documents.are_padded is not False:
            return inputs
        return {name: value for name, value in inputs.items() if name not in _MASKS or not _is_padding_mask(value)}


def _takes_borders(model: nn.Module) -> bool:
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    # Models for flash attention pass keywords and sliding windows on to their attention.
    is_varlen = all(
        part.config._attn_implementation in (VARLEN, *FLASH) and part._supports_flash_attn for part in parts
    )
    return is_varlen and why_mixed(model) is None


def _borders(inputs: Mapping[str, Any], documents: Documents) -> dict[str, Any]:
    device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
    borders = documents.borders.to(device, non_blocking=True)
    lengths = dict.fromkeys(("max_length_q", "max_length_k"), documents.longest)
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, **lengths}


def padded_rows(batch: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """Returns for each row of a batch whether a mask hides one of its tokens, or None if that is not known.

    Args:
        batch: the batch on the host. Nothing is known of masks on another device or of another form, because to read
            them would wait for the device.

    Shapes:
        each mask in the batch: (B, T).
    """
    masks = [batch[name] for name in _MASKS if batch.get(name) is not None]
    if not all(_is_padding_mask(mask) and mask.device.type == "cpu" for mask in masks):
        return None
    rows = [(mask_BT != 1).any(dim=1).tolist() for mask_BT in masks]
    return tuple(any(found) for found in zip(*rows, strict=True)) if len({len(row) for row in rows}) <= 1 else None


def _is_padding_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2


def why_left_alone(model: nn.Module) -> str | None:
    """Returns the reason why a model keeps transformers' own detection of masks, or None if the host decides.

    Args:
        model: the model, with its adapter if it has one.
    """
    if reason := _why_unknown_functions():
        return reason
    adapters = getattr(model, "peft_config", {})
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(adapters, "values", tuple)()):
        return "its adapter puts tokens in front of each row"
    # An adapter of peft has the model inside it.
    inner: Any = getattr(model, "get_base_model", None)
    model = inner() if callable(inner) else model
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} is not a model of transformers"
    if own := next(
        (type(part) for part in parts if not type(part).__module__.startswith("transformers.models.")), None
    ):
        return f"{own.__name__} is not a class of transformers, and may choose positions by itself"
    if len({type(part.config) for part in parts}) > 1:
        return f"{type(model).__name__} consists of several models, and each may have masks of its own"
    if any(family not in _measured_families() for family in (part.__module__.split(".")[2] for part in parts)):
        return f"it was not measured that {type(model).__name__} needs masks for nothing else"
    return None


@functools.cache
def _measured_families() -> frozenset[str]:
    return frozenset(json.loads(_TABLE.read_text(encoding="utf-8"))["equal"])


@functools.cache
def _why_unknown_functions() -> str | None:
    for name, expected in _REPLACED.items():
        found = getattr(masking_utils, name, None)
        if found is None or list(inspect.signature(found).parameters) != expected:
            return f"transformers.masking_utils.{name} is another function in this version of transformers"
    return None


@contextlib.contextmanager
def _answering(are_packed: bool, are_padded: bool | None, *, takes_borders: bool) -> Iterator[None]:
    before = _answers.are_packed, _answers.are_padded
    _answers.are_packed, _answers.are_padded = are_packed, are_padded
    try:
        with expecting_borders() if takes_borders else _NOTHING_TO_DO:
            yield
    finally:
        _answers.are_packed, _answers.are_padded = before


@functools.cache
def _replace_detection() -> None:
    """Replaces, once, the functions of transformers that read the batch. Without answers they do what they did."""
    for name, made in _REPLACEMENTS.items():
        setattr(masking_utils, name, made(getattr(masking_utils, name)))
    masks = masking_utils.AttentionMaskInterface._global_mapping
    for name in [name for name, make in masks.items() if make is masking_utils.flash_attention_mask]:
        masks[name] = _flash_attention_mask


def _packed_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if _answers.are_packed is None:
            found: Tensor | None = original(position_ids)
            return found
        if not _answers.are_packed:
            return None
        steps_BT = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps_BT != 1).cumsum(-1)

    return find_packed_sequence_indices


def _ignored_causal(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ignore_causal_mask_sdpa(
        padding_mask: Tensor | None,
        q_length: int,
        kv_length: int,
        q_offset: Any,
        kv_offset: Any,
        local_attention_size: int | None = None,
    ) -> Any:
        # With a cache, the lengths differ.
        if _answers.are_packed is None or isinstance(q_offset, Tensor) or q_length != kv_length:
            return original(padding_mask, q_length, kv_length, q_offset, kv_offset, local_attention_size)
        if padding_mask is None:
            return local_attention_size is None or kv_length < local_attention_size
        if _answers.are_padded:
            return False
        return original(padding_mask, q_length, kv_length, q_offset, kv_offset, local_attention_size)

    return ignore_causal_mask_sdpa


def _ignored_bidirectional(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ignore_bidirectional_mask_sdpa(
        padding_mask: Tensor | None, kv_length: int, local_attention_size: int | None = None
    ) -> Any:
        if _answers.are_packed is not None and padding_mask is None:
            return local_attention_size is None or kv_length < local_attention_size
        if _answers.are_padded:
            return False
        return original(padding_mask, kv_length, local_attention_size)

    return ignore_bidirectional_mask_sdpa


def _all_ones(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fast_all(tensor: Tensor) -> Any:
        return False if _answers.are_padded else original(tensor)

    return fast_all


_REPLACEMENTS = {
    "find_packed_sequence_indices": _packed_sequences,
    "_ignore_causal_mask_sdpa": _ignored_causal,
    "_ignore_bidirectional_mask_sdpa": _ignored_bidirectional,
    "fast_all": _all_ones,
}


def _flash_attention_mask(batch_size: int, q_length: int, kv_length: int, **keywords: Any) -> Tensor | None:
    """Returns the padding mask of flash attention, which needs no mask of another shape.

    Shapes:
        Returns (B, T), or None.
    """
    mask_BT: Tensor | None = keywords.get("attention_mask")
    if mask_BT is not None and _answers.are_padded:
        return mask_BT[:, -kv_length:]
    found: Tensor | None = masking_utils.flash_attention_mask(batch_size, q_length, kv_length, **keywords)
    return found
