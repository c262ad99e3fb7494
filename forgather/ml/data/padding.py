"""Padding collators, which turn rows of different lengths into one batch of tensors.

The input is rows of numbers; the output is tensors. Columns with one value per token are padded at the end to the
longest row. Labels of the rows are kept. The mask is computed from the lengths of the rows, never from token ids, so a
tokenizer may use the end-of-text token for padding. A column that needs padding and has no padding value raises an
error with its name.

Shape suffixes: B rows, T tokens of the longest row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.data_errors import DataError

_IGNORED = -100
_IDS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"
_OTHER_LABELS = ("label", "label_ids")


class PaddingCollator:
    """A collator that pads rows to the length of the longest row and keeps the labels of the rows.

    Args:
        tokenizer: the tokenizer whose padding id is used. Without a tokenizer or padding id, 0 is used; the mask and
            the labels exclude padding from attention and loss.
        pad_to_multiple_of: the number to a multiple of which the length is rounded up, or None for no rounding.
        pad_values: the padding values of further columns with one value per token, by column.

    Raises:
        DataError: FG839 if `pad_to_multiple_of` is below 1.

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
        refuse_wrong_values("data:PaddingCollator", locals())
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
        """Returns a batch of padded or stacked `rows`; an `attention_mask` is added if the rows have none.

        Args:
            rows: the rows of the batch, which all have the same columns.

        Shapes:
            Columns with one value per token: (B, T). Columns of equal shape in all rows: (B, ...).

        Raises:
            DataError: FG847 if the rows have different columns, or if a column can be neither padded nor stacked.
        """
        columns = {_name(name, rows[0]): _tensors(name, rows) for name in _columns(rows)}
        tokens = [len(ids) for ids in columns.get(_IDS, ())]
        length = math.ceil(max(tokens, default=0) / self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = {name: self._joined(name, values, tokens, length) for name, values in columns.items()}
        if tokens and _MASK not in batch:
            # From lengths, not from `pad_token_id`: with padding by the end-of-text token the last real token would be
            # masked too.
            batch[_MASK] = (torch.arange(length) < torch.tensor(tokens)[:, None]).long()
        return batch

    def _joined(self, name: str, values: list[Tensor], tokens: list[int], length: int) -> Tensor:
        """Returns a padded tensor (B, T) for a column with one value per token, and a stacked tensor for any other."""
        shapes = [tuple(value.shape) for value in values]
        # By shape and not by name, so that columns of the user's own are padded too.
        by_token = bool(tokens) and shapes == [(count,) for count in tokens]
        if not by_token and name == _LABELS and len({*shapes}) > 1 and all(value.ndim == 1 for value in values):
            length = max(count for (count,) in shapes)  # labels of a decoder have their own length
            by_token = True
        if by_token and (pad := self._pad_value(name, values)) is not None:
            batch_BT = values[0].new_full((len(values), length), pad)
            for row_T, value in zip(batch_BT, values, strict=True):
                row_T[: len(value)] = value
            return batch_BT
        # Rows of equal length are refused too when `input_ids` are padded further: the column would be shorter than
        # they are.
        if len({*shapes}) > 1 or (by_token and shapes[0] != (length,)):
            hint = f"give it a value in pad_values ({name}: 0), or remove the column"
            raise _refused(name, "has rows of different lengths and no padding value", hint)
        return torch.stack(values)

    def _pad_value(self, name: str, values: Sequence[Tensor]) -> float | None:
        """Returns the padding value of a column, or None if the value is unknown.

        Floating-point columns have no default padding value, because no loss ignores a floating-point label.
        """
        return self._chosen.get(name, None if values[0].is_floating_point() else self._known.get(name))


class CausalLMCollator(PaddingCollator):
    """A collator that pads rows for a causal language model; rows without labels get their inputs as labels.

    Labels of the rows are kept, so a masked prompt stays masked. Padding has the label -100. Rows with `position_ids`
    and without an `attention_mask` get no mask: every padding token is at position 0, so that the model treats each
    padding token as a separate document.
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns a padded batch of `rows`, with labels.

        Args:
            rows: the rows of the batch, which all have the same columns, including `input_ids`.

        Shapes:
            `input_ids` and `labels`: (B, T).

        Raises:
            DataError: FG847 if the rows have no `input_ids`, if a row does not have one label per token, or in the
                cases in which `PaddingCollator` raises it.
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
            # A mask together with packed positions makes transformers ignore the document boundaries.
            del batch[_MASK]
        return batch


def _name(name: str, row: Mapping[str, Any]) -> str:
    # As transformers' default collator does: its models take `labels`.
    return _LABELS if name in _OTHER_LABELS and _LABELS not in row else name


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the columns of `rows`, without the columns that are None in every row."""
    for row in rows:
        # Checked before anything is padded: a KeyError for a late row would not name the column.
        if different := sorted({*rows[0]}.symmetric_difference(row)):
            raise _refused(different[0], "is in some rows and not in others", "give every row the same columns")
    return [name for name in rows[0] if any(row[name] is not None for row in rows)]


def _tensors(name: str, rows: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    try:
        tensors = [torch.as_tensor(row[name]) for row in rows]
    except (TypeError, ValueError, RuntimeError):
        kind = type(next(row[name] for row in rows if row[name] is not None)).__name__
        raise _refused(name, f"contains values that are not numbers ({kind})", "remove the column") from None
    # The loss and embeddings of torch need int64; packed rows on disk are int32.
    return [tensor.long() if tensor.dtype in _WHOLE else tensor for tensor in tensors]


_WHOLE = (torch.int32, torch.int16, torch.int8, torch.uint8)


def _refused(name: str, found: str, hint: str) -> DataError:
    return DataError(f"the rows cannot be padded: {name!r} {found}", code="FG847", hint=hint, found=name)
