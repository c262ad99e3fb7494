"""What masks attention in a batch: padding, and rows of several documents.

A model takes another path, with more memory, if one token of a micro-batch is padding, or one row holds two documents.
Rows that are copied for a plan have neither, though some micro-batch of the run does. `Masking` says what the data has,
and `masked` gives it to a batch.

Source:
    `transformers.masking_utils`: a mask is left out if no token is padding and positions do not start again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgather.ml.attention_inputs import padded_rows
from forgather.ml.documents import Documents
from forgather.ml.model_inputs import DOCUMENTS
from forgather.ml.trainer.data_rng import IsolatedRNG
from forgather.ml.trainer.stream_choice import is_iterable

_POSITIONS, _MASK = "position_ids", "attention_mask"
_MOST_READ, _MOST_MEASURED = 1000, 100


class Masking(NamedTuple):
    """What masks attention in some micro-batch of a data set.

    Args:
        is_padded: rows are of several lengths, so that all but the longest of a micro-batch are padded.
        is_divided: a row holds several documents, whose positions start again.
    """

    is_padded: bool = False
    is_divided: bool = False


def is_divided(dataset: Any) -> bool:
    """Returns whether one of the first rows of a data set holds several documents.

    Args:
        dataset: the rows. Those without `position_ids` hold one document each; nothing is known of a stream.
    """
    if is_iterable(dataset):
        return False
    with IsolatedRNG().seeded(0):
        if not len(dataset) or not isinstance(first := dataset[0], Mapping) or _POSITIONS not in first:
            return False
        if hasattr(dataset, "select_columns"):
            dataset = dataset.select_columns(_POSITIONS)
        count = min(len(dataset), _MOST_READ)
        return any(_starts_again(dataset[number][_POSITIONS]) for number in range(count))


def document_length(dataset: Any) -> float:
    """Returns the length of the document of a token in packed rows, as a mean over the tokens of the first rows.

    Args:
        dataset: the rows, of which `is_divided` is true.

    Units:
        tokens.
    """
    num_tokens = num_pairs = 0
    with IsolatedRNG().seeded(0):
        for number in range(min(len(dataset), _MOST_MEASURED)):
            positions = torch.as_tensor(dataset[number][_POSITIONS])
            num_tokens += len(positions)
            num_pairs += Documents(positions[None], (1, len(positions))).num_pairs
    return num_pairs / num_tokens if num_tokens else 0.0


def masked(batch: Any, masking: Masking) -> Any:
    """Returns a batch in which attention is masked if it is in some micro-batch of the data.

    Args:
        batch: a micro-batch, whose rows may all be alike. One without masks or positions is returned as it is.
        masking: what the data has.

    Shapes:
        batch: its `attention_mask` and `position_ids` are of shape (B, T); B: rows, T: tokens.
    """
    if not isinstance(batch, Mapping):
        return batch
    changed = {name: _changed(name, item, masking) for name, item in batch.items()}
    if DOCUMENTS in batch:
        # Those of the batch before its rows were repeated or masked would say that it has no mask.
        return changed | {DOCUMENTS: _documents(changed)}
    return batch if all(changed[name] is item for name, item in batch.items()) else changed


def _documents(batch: Mapping[str, Any]) -> Documents:
    main = batch.get("input_ids", batch.get("inputs_embeds"))
    positions = batch.get(_POSITIONS) if batch.get(_MASK) is None else None
    positions = positions if isinstance(positions, Tensor) and positions.dim() == 2 else None
    assert isinstance(main, Tensor), "documents are those of tokens"  # noqa: S101
    return Documents(positions, (main.shape[0], main.shape[1]), padded_rows=padded_rows(batch))


def _changed(name: str, item: Any, masking: Masking) -> Any:
    if not isinstance(item, Tensor) or item.dim() != 2 or item.is_floating_point():
        return item
    pads = masking.is_padded and name.endswith(_MASK) and len(item) > 1 and bool(item.all())
    starts_again = masking.is_divided and name == _POSITIONS and not _starts_again(item)
    if not pads and not starts_again:
        return item
    item = item.clone()
    item[-1, -1] = 0
    return item


def _starts_again(positions: Any) -> bool:
    return bool(torch.as_tensor(positions).diff().ne(1).any())
