"""The numbers of rows and tokens in a batch, whatever its form: mapping, tuple or tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from forgather.ml.types import MAPPINGS, PaddingBatch


def num_rows(batch: Any) -> int:
    """Returns the number of rows that contribute to the loss: 0 for a `PaddingBatch`.

    The number of rows of any other batch is the size of the first dimension of its first tensor.

    Units:
        rows.
    """
    if isinstance(batch, PaddingBatch):
        return 0
    return _rows_of(_first_tensor(batch))


def _rows_of(tensor: Tensor | None) -> int:
    return 1 if tensor is None or tensor.ndim == 0 else int(tensor.shape[0])


def num_tokens(batch: Any) -> int:
    """Returns the number of input tokens in a batch, or the number of rows if its inputs are not token ids.

    Units:
        tokens, or rows.
    """
    if isinstance(batch, PaddingBatch):
        return 0
    return _tokens_of(_ids_of(batch), _first_tensor(batch))


def _tokens_of(ids: Tensor | None, first: Tensor | None) -> int:
    if ids is not None:
        return ids.numel()
    return _rows_of(first) if first is None or first.is_floating_point() else first.numel()


def _ids_of(batch: Any) -> Tensor | None:
    ids = batch.get("input_ids") if isinstance(batch, MAPPINGS) else None
    return ids if isinstance(ids, Tensor) else None


class BatchSizes(NamedTuple):
    """The numbers of rows and tokens in a batch; all are 0 for a `PaddingBatch`.

    Args:
        rows: the number of rows, see `num_rows`.
        tokens: the number of input tokens, see `num_tokens`.
        unpadded: the number of input tokens that the attention mask does not hide, or else `tokens`.
    """

    rows: int
    tokens: int
    unpadded: int


def batch_sizes(batch: Any) -> BatchSizes:
    """Returns the numbers of rows and tokens in a batch.

    Units:
        rows; tokens, or rows if the inputs are not token ids.

    Source:
        `transformers.Trainer._track_num_input_tokens`, which without a mask compares with the padding token. That would
        leave out real tokens where the end-of-text token pads.
    """
    if isinstance(batch, PaddingBatch):
        return BatchSizes(0, 0, 0)
    first, ids = _first_tensor(batch), _ids_of(batch)
    rows, tokens = _rows_of(first), _tokens_of(ids, first)
    mask = None if ids is None else batch.get("attention_mask")
    if ids is not None and isinstance(mask, Tensor) and mask.shape == ids.shape:
        return BatchSizes(rows, tokens, int(mask.sum()))
    return BatchSizes(rows, tokens, tokens)


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    for item in batch.values() if isinstance(batch, MAPPINGS) else batch:
        if isinstance(item, Tensor):
            return item
    return None
