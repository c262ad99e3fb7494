"""Rows as the model gets them, as plain lists for output: tokens with labels and kinds, and the other columns.

Takes collated batches; gives one `ShownRow` for each row, and its facts for JSON.

Shapes:
    B rows, T tokens of a row, U tokens of a decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forgather.ml.data.collated_rows import RowBatch, array_of
from forgather.ml.data.token_kinds import IGNORED, Kind, TokenBatch
from forgather.ml.data.token_text import TokenText

_OF_TOKENS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
_FEW = 12  # a column of at most so many numbers is shown as it is
_MOST_TEXT = 300


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """One row of a collated batch.

    Args:
        number: the number of the row in the data set.
        ids_T: the token ids, with padding; empty for a row without tokens.
        kinds_T: the kind of each token.
        labels_T: the label of each token; None if the labels are not of tokens.
        starts: the places at which documents start.
        has_positions: whether documents within the row are known.
        target_ids_U: the labels of another sequence, as of a decoder; None if there are none.
        columns: the other columns, with the label of the row if it has one.
    """

    number: int
    ids_T: list[int] = field(default_factory=list)
    kinds_T: list[Kind] = field(default_factory=list)
    labels_T: list[int] | None = None
    starts: list[int] = field(default_factory=list)
    has_positions: bool = False
    target_ids_U: list[int] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target_kinds_U(self) -> list[Kind]:
        """The kinds of the tokens of the decoder: trained, or padding where the label is -100."""
        return [Kind.PADDING if label == IGNORED else Kind.TRAINED for label in self.target_ids_U or ()]

    def count(self, kind: Kind) -> int:
        """Returns the number of tokens of a kind."""
        return self.kinds_T.count(kind)

    @property
    def length(self) -> int:
        """The number of tokens without padding."""
        return len(self.kinds_T) - self.count(Kind.PADDING)


def shown_rows(batch: RowBatch, tokens: TokenBatch | None) -> list[ShownRow]:
    """Returns the rows of a batch.

    Args:
        batch: the batch.
        tokens: its tokens, or None for rows without tokens.
    """
    if not batch.columns:
        return [ShownRow(number=number, columns=_own_columns(row)) for number, row in batch.rows.items()]
    if tokens is None:
        return [
            ShownRow(number=number, columns=_at(batch.columns, place)) for place, number in enumerate(batch.numbers)
        ]
    labels = batch.columns.get("labels")
    is_decoder = tokens.labels_BT is None and labels is not None and labels.ndim == 2 and labels.dtype.kind == "i"
    of_tokens = {*_OF_TOKENS, *(("labels",) if tokens.labels_BT is not None or is_decoder else ())}
    others = {name: values for name, values in batch.columns.items() if name not in of_tokens}
    return [
        ShownRow(
            number=number,
            ids_T=tokens.ids_BT[place].tolist(),
            kinds_T=[Kind(kind) for kind in tokens.kinds_BT[place].tolist()],
            labels_T=None if tokens.labels_BT is None else tokens.labels_BT[place].tolist(),
            starts=np.flatnonzero(tokens.starts_BT[place]).tolist(),
            has_positions=tokens.has_positions,
            target_ids_U=labels[place].tolist() if is_decoder and labels is not None else None,
            columns=_at(others, place),
        )
        for place, number in enumerate(batch.numbers)
    ]


def row_fact(row: ShownRow, text: TokenText) -> dict[str, Any]:
    """Returns a row as plain data for JSON.

    Args:
        row: the row.
        text: the texts of tokens.
    """
    fact: dict[str, Any] = {"row": row.number}
    if row.ids_T:
        fact |= {
            "length": row.length,
            "num_trained": row.count(Kind.TRAINED) if row.labels_T is not None else None,
            "num_masked": row.count(Kind.MASKED) if row.labels_T is not None else None,
            "num_padding": row.count(Kind.PADDING),
            "document_starts": row.starts,
            "input_ids": row.ids_T,
            "labels": row.labels_T,
            "tokens": [text(token_id) for token_id in row.ids_T],
            "kinds": [kind.word for kind in row.kinds_T],
        }
    if row.target_ids_U is not None:
        fact |= {
            "target_labels": row.target_ids_U,
            "target_tokens": [None if label == IGNORED else text(label) for label in row.target_ids_U],
            "target_kinds": [kind.word for kind in row.target_kinds_U],
        }
    return {**fact, "columns": {name: _plain(value) for name, value in row.columns.items()}}


def value_text(value: Any) -> str:
    """Returns a value of a column as text: a few numbers as they are, many as their type, shape and range.

    Example:
        >>> value_text(np.array([1, 2])), value_text("some text")
        ('1 2', "'some text'")
        >>> value_text(np.zeros((3, 32, 32), dtype=np.float32))
        'float32 (3, 32, 32), from 0 to 0, mean 0'
    """
    array = value if isinstance(value, np.ndarray) else array_of(value)
    if array.dtype.kind not in "iufb":
        shown = repr(array.tolist() if isinstance(value, np.ndarray | np.generic) else value)
        return shown if len(shown) <= _MOST_TEXT else f"{shown[:_MOST_TEXT]}... ({len(shown):,} characters)"
    if array.ndim < 2 and array.size <= _FEW:
        return " ".join(f"{number:.6g}" if array.dtype.kind == "f" else str(number) for number in array.reshape(-1))
    shape = f"{array.dtype} {tuple(array.shape)}"
    if not array.size:
        return shape
    numbers = array.astype(np.float64)
    return f"{shape}, from {numbers.min():.4g} to {numbers.max():.4g}, mean {numbers.mean():.4g}"


def _own_columns(row: Any) -> dict[str, Any]:
    if isinstance(row, Mapping):
        return {str(name): row[name] for name in row}
    values = row if isinstance(row, list | tuple) else [row]
    return {str(place): value for place, value in enumerate(values)}


def _at(columns: Mapping[str, np.ndarray], place: int) -> dict[str, Any]:
    """Returns the values of one row; a column without rows, as a number for the whole batch, is the same for all."""
    return {name: values[place] if values.ndim and place < len(values) else values for name, values in columns.items()}


def _plain(value: Any) -> Any:
    array = value if isinstance(value, np.ndarray | np.generic) else array_of(value)
    return array.tolist() if array.dtype.kind in "iufbUS" else value_text(value)
