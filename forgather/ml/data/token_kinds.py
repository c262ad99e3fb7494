"""The part that each token of a batch has in the loss: trained, masked or padding.

Takes the tensors that a collator returns; gives arrays of the same shape. Labels belong to the token at which they are:
a causal language model shifts them, so the label of a token is the target of the position before it, and that of the
first token of a row is the target of none.

Shapes:
    B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

IGNORED = -100
_IDS, _MASK, _LABELS, _POSITIONS = "input_ids", "attention_mask", "labels", "position_ids"


class Kind(IntEnum):
    """The part of a token in the loss.

    `INPUT` is the kind of all tokens, except padding, if the batch does not have one label for each token: the labels
    are then of the whole row, or of another sequence.
    """

    PADDING = 0
    MASKED = 1
    TRAINED = 2
    INPUT = 3

    @property
    def word(self) -> str:
        """The name of the kind in output and JSON."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The tokens of a batch, with their labels and kinds.

    Args:
        ids_BT: the token ids.
        kinds_BT: the kinds, as values of `Kind`.
        labels_BT: the labels; None if the batch does not have one label for each token.
        starts_BT: a mask that is True at the first token of each document. The first token of a row that is not padding
            always starts a document.
        has_positions: whether the batch has positions, from which documents within a row are known.

    Shapes:
        ids_BT, kinds_BT, labels_BT, starts_BT: (B, T).
    """

    ids_BT: np.ndarray
    kinds_BT: np.ndarray
    labels_BT: np.ndarray | None
    starts_BT: np.ndarray
    has_positions: bool

    @property
    def labelled_padding_BT(self) -> np.ndarray:
        """A mask that is True at padding tokens with a label, which the loss counts.

        Shapes:
            Returns (B, T).
        """
        if self.labels_BT is None:
            return np.zeros(self.ids_BT.shape, dtype=bool)
        labelled_BT: np.ndarray = (self.kinds_BT == Kind.PADDING) & (self.labels_BT != IGNORED)
        return labelled_BT


def token_batch(batch: Mapping[str, np.ndarray], *, is_causal: bool, rows: Sequence[Any] = ()) -> TokenBatch | None:
    """Returns the tokens of a batch with their kinds, or None if the batch has no token ids.

    Padding is what `attention_mask` excludes. A batch without such a mask, as of packed rows, has padding where the
    collator made a row longer than it is in the data set.

    Args:
        batch: the columns that the collator returned.
        is_causal: whether the model compares the logits of a token with the label of the next token. The label of the
            first token of a row is then not used, and the token is masked.
        rows: the rows of the data set from which the batch was made, in the same order.

    Shapes:
        The columns `input_ids`, `attention_mask` and `position_ids`: (B, T).

    Example:
        >>> ids, labels = np.array([[7, 8, 9, 0]]), np.array([[7, -100, 9, -100]])
        >>> columns = {"input_ids": ids, "labels": labels, "attention_mask": np.array([[1, 1, 1, 0]])}
        >>> [Kind(kind).word for kind in token_batch(columns, is_causal=True).kinds_BT[0]]
        ['masked', 'masked', 'trained', 'padding']
    """
    ids_BT = batch.get(_IDS)
    if ids_BT is None or ids_BT.ndim != 2 or not np.issubdtype(ids_BT.dtype, np.integer):
        return None
    is_padding_BT = _padding(batch, ids_BT, rows)
    labels_BT = batch.get(_LABELS)
    kinds_BT = np.full(ids_BT.shape, Kind.INPUT, dtype=np.int8)
    if labels_BT is not None and labels_BT.shape == ids_BT.shape:
        is_trained_BT = labels_BT != IGNORED
        if is_causal:
            is_trained_BT = is_trained_BT & (np.arange(ids_BT.shape[1]) > 0)
        kinds_BT = np.where(is_trained_BT, Kind.TRAINED, Kind.MASKED).astype(np.int8)
    else:
        labels_BT = None
    kinds_BT[is_padding_BT] = Kind.PADDING
    starts_BT = _starts(batch.get(_POSITIONS), is_padding_BT)
    return TokenBatch(
        ids_BT=ids_BT,
        kinds_BT=kinds_BT,
        labels_BT=labels_BT,
        starts_BT=starts_BT,
        has_positions=_POSITIONS in batch,
    )


def _padding(batch: Mapping[str, np.ndarray], ids_BT: np.ndarray, rows: Sequence[Any]) -> np.ndarray:
    mask_BT = batch.get(_MASK)
    if mask_BT is not None and mask_BT.shape == ids_BT.shape:
        is_excluded_BT: np.ndarray = mask_BT == 0
        return is_excluded_BT
    is_padding_BT = np.zeros(ids_BT.shape, dtype=bool)
    for ids_T, is_padding_T, row in zip(ids_BT, is_padding_BT, rows, strict=False):
        own = np.asarray(row[_IDS]) if isinstance(row, Mapping) and _IDS in row else None
        if own is None or own.ndim != 1 or not 0 < len(own) < len(ids_T):
            continue
        # Padded at the start if the row is found only at the end.
        if np.array_equal(ids_T[: len(own)], own) or not np.array_equal(ids_T[-len(own) :], own):
            is_padding_T[len(own) :] = True
        else:
            is_padding_T[: -len(own)] = True
    return is_padding_BT


def _starts(positions_BT: np.ndarray | None, is_padding_BT: np.ndarray) -> np.ndarray:
    is_token_BT = ~is_padding_BT
    starts_BT = np.zeros(is_padding_BT.shape, dtype=bool)
    if positions_BT is not None and positions_BT.ndim == 2 and positions_BT.shape[1] == is_padding_BT.shape[1]:
        # One row of positions may stand for all rows.
        starts_BT |= (positions_BT == 0) & is_token_BT
    has_tokens_B = is_token_BT.any(axis=1)
    starts_BT[np.flatnonzero(has_tokens_B), is_token_BT.argmax(axis=1)[has_tokens_B]] = True
    return starts_BT
