"""Rows of other lengths: rows of the data, repeated or cut, so that a plan can be made for any number of tokens.

A trace needs shapes, not texts. `ResizedRows` changes the length of each row before the collator sees it, so that
padding, masks and positions are made as in the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

_IDS, _POSITIONS, _PROMPT = "input_ids", "position_ids", "prompt_ids"
_ANSWERS = frozenset({"chosen_ids", "rejected_ids", "completion_ids", "kl_ids"})


class ResizedRows(Dataset[Any]):
    """The rows of a map-style data set, all longer or shorter by one number of tokens.

    Args:
        dataset: the data set, whose rows are mappings.
        more: the number of tokens that are added to each row; a negative number removes tokens. One token stays.
    """

    def __init__(self, dataset: Any, more: int) -> None:
        self._dataset, self._more = dataset, more

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        row = self._dataset[number]
        return resized_row(row, self._more) if self._more else row


def num_tokens(row: Mapping[str, Any]) -> int:
    """Returns the number of tokens of a row; of a row of preferences, those of the prompt with the longest answer."""
    if _PROMPT in row:
        return len(row[_PROMPT]) + max(len(row[name]) for name in _ANSWERS if name in row)
    return len(row[_IDS])


def resized_row(row: Mapping[str, Any], more: int) -> dict[str, Any]:
    """Returns a row with more or fewer tokens: all columns that have one value for each token change alike.

    A row of one document stays one, and a row of several documents has several, because models mask them otherwise. A
    row of preferences keeps its prompt while there is room for one token of the longest answer.

    Args:
        row: the row.
        more: the number of tokens that are added, or removed if it is negative.

    Example:
        >>> resized_row({"input_ids": [5, 6, 7], "position_ids": [0, 1, 2], "label": 1}, 2)
        {'input_ids': [5, 6, 7, 5, 6], 'position_ids': [0, 1, 2, 3, 4], 'label': 1}
        >>> resized_row({"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}, -1)
        {'input_ids': [6, 7], 'position_ids': [1, 0]}
        >>> resized_row({"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8, 9, 2]}, -2)
        {'prompt_ids': [5, 6], 'chosen_ids': [7], 'rejected_ids': [8]}
    """
    whole = num_tokens(row)
    length = max(1, whole + more)
    if _PROMPT in row:
        prompt = max(1, min(len(row[_PROMPT]), length - 1))
        less = whole - len(row[_PROMPT]) - (length - prompt)
        sizes = {name: max(1, len(row[name]) - less) for name in _ANSWERS if name in row}
        sizes[_PROMPT] = prompt
        return {name: _taken(item, 0, sizes[name]) if name in sizes else item for name, item in row.items()}
    border = next((place for place, number in enumerate(row.get(_POSITIONS, ())) if place and int(number) == 0), 0)
    # One of several documents that is cut keeps the border between two of them.
    start = border - 1 if length <= border else 0
    found = {name: _taken(item, start, length) if _is_by_token(item, whole) else item for name, item in row.items()}
    if _POSITIONS in row and not border:
        found[_POSITIONS] = _like(row[_POSITIONS], range(length))
    return found


def _is_by_token(item: Any, length: int) -> bool:
    is_list = isinstance(item, Sized) and not isinstance(item, str | bytes | Mapping)
    return is_list and getattr(item, "shape", None) != () and len(item) == length


def _taken(item: Any, start: int, length: int) -> Any:
    places = [(start + number) % len(item) for number in range(length)]
    return item[places] if isinstance(item, Tensor) else [item[place] for place in places]


def _like(item: Any, values: Iterable[Any]) -> Any:
    return torch.tensor(list(values), dtype=item.dtype) if isinstance(item, Tensor) else list(values)
