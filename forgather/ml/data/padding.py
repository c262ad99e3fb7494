"""Rows of different length to a batch.

Takes rows of numbers; gives tensors, columns of one value a token padded at the end to the longest row. Keeps true:
labels that a row has are kept; what is padding is known by length, never by a token, so a tokenizer may pad with its
end-of-text token; the first token of a row stays the first; a column that nobody knows how to pad is refused by name.

Letters of shapes: B rows, T tokens of the longest row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgather.ml.data.data_errors import DataError

_IGNORED = -100
_IDS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"
_OTHER_LABELS = ("label", "label_ids")


class PaddingCollator:
    """Pads rows to the longest of them, and keeps the labels that they have.

    Args:
        tokenizer: gives the ids of padding; any id does where there is none, since the mask and the labels hide it.
        pad_to_multiple_of: pad to the next length that is a multiple of this one.
        pad_values: what other columns with one value a token are padded with, by name.

    Raises:
        DataError: FG839 for a multiple below one.

    Example:
        >>> batch = PaddingCollator()([{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}])
        >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["attention_mask"].tolist()
        ([[5, 6], [7, 0]], [[-100, 6], [7, -100]], [[1, 1], [1, 0]])
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        pad_to_multiple_of: int | None = None,
        pad_values: Mapping[str, float] | None = None,
    ) -> None:
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            message = f"pad_to_multiple_of must be at least 1; got {pad_to_multiple_of!r}"
            raise DataError(message, code="FG839", found=pad_to_multiple_of).about("pad_to_multiple_of")
        self.tokenizer = tokenizer
        self.pad_to_multiple_of = pad_to_multiple_of or 1
        self._chosen = dict(pad_values or {})
        self._known: dict[str, float] = {
            _IDS: getattr(tokenizer, "pad_token_id", None) or 0,
            _MASK: 0,
            _LABELS: _IGNORED,
            "position_ids": 0,
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", None) or 0,
            "special_tokens_mask": 1,
        }

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns the batch of `rows`.

        Raises:
            DataError: FG847 for rows with different columns, or a column that can be neither padded nor stacked.
        """
        columns = {_name(name, rows[0]): _tensors(name, rows) for name in _columns(rows)}
        tokens = [len(ids) for ids in columns.get(_IDS, ())]
        length = math.ceil(max(tokens, default=0) / self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = {name: self._joined(name, values, tokens, length) for name, values in columns.items()}
        if tokens and _MASK not in batch:
            batch[_MASK] = (torch.arange(length) < torch.tensor(tokens)[:, None]).long()
        return batch

    def _joined(self, name: str, values: list[Tensor], tokens: list[int], length: int) -> Tensor:
        """Returns (B, T) where rows have one value a token; else rows of one shape, stacked."""
        shapes = [tuple(value.shape) for value in values]
        by_token = bool(tokens) and shapes == [(count,) for count in tokens]
        if not by_token and name == _LABELS and len({*shapes}) > 1 and all(value.ndim == 1 for value in values):
            length = max(count for (count,) in shapes)  # of a sequence of its own, as a decoder's
            by_token = True
        if by_token and (pad := self._pad_value(name, values)) is not None:
            batch_BT = values[0].new_full((len(values), length), pad)
            for row_T, value in zip(batch_BT, values, strict=True):
                row_T[: len(value)] = value
            return batch_BT
        if len({*shapes}) > 1 or (by_token and shapes[0] != (length,)):
            hint = f"give it a value in pad_values ({name}: 0), or remove the column"
            raise _refused(name, "has rows of different length, and nothing says what to pad them with", hint)
        return torch.stack(values)

    def _pad_value(self, name: str, values: Sequence[Tensor]) -> float | None:
        """Returns what a column is padded with; None where nobody knows. No number of a float column can be ignored."""
        return self._chosen.get(name, None if values[0].is_floating_point() else self._known.get(name))


class CausalLMCollator(PaddingCollator):
    """Pads texts for a causal language model: where rows have no labels, the labels are the inputs.

    Labels that a row has are kept, so a prompt that is masked stays so. Padding has the label -100. Rows with
    `position_ids` get no mask: each token of padding is at position 0, and so a document of its own.
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns the batch of `rows`, with labels.

        Raises:
            DataError: FG847, as `PaddingCollator`; for rows without tokens, or with another number of labels, as well.
        """
        columns = _columns(rows)
        if _IDS not in columns:
            raise _refused(_IDS, "is missing", "give rows of token ids, as tokenize_examples makes them")
        if _LABELS not in columns:
            rows = [{**row, _LABELS: row[_IDS]} for row in rows]
        for row in rows:
            labels, tokens = row[_LABELS], len(row[_IDS])
            if (found := len(labels) if hasattr(labels, "__len__") else 0) != tokens:
                hint = "give one label a token, -100 where there is nothing to learn"
                raise _refused(_LABELS, f"has {found} values in a row of {tokens} tokens", hint)
        batch = super().__call__(rows)
        if "position_ids" in batch and _MASK not in rows[0]:
            del batch[_MASK]
        return batch


def _name(name: str, row: Mapping[str, Any]) -> str:
    return _LABELS if name in _OTHER_LABELS and _LABELS not in row else name


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the columns of rows, without those that hold nothing."""
    for row in rows:
        if different := sorted({*rows[0]}.symmetric_difference(row)):
            raise _refused(different[0], "is in some rows and not in others", "give every row the same columns")
    return [name for name in rows[0] if any(row[name] is not None for row in rows)]


def _tensors(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    try:
        tensors = [torch.as_tensor(row[name]) for row in rows]
    except (TypeError, ValueError, RuntimeError):
        kind = type(next(row[name] for row in rows if row[name] is not None)).__name__
        raise _refused(name, f"holds values that are no numbers ({kind})", "remove the column") from None
    return [tensor.long() if tensor.dtype in _WHOLE else tensor for tensor in tensors]


_WHOLE = (torch.int32, torch.int16, torch.int8, torch.uint8)


def _refused(name: str, found: str, hint: str) -> DataError:
    return DataError(f"the rows cannot be padded: {name!r} {found}", code="FG847", hint=hint, found=name)
