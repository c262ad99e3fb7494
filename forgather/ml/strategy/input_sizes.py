"""The sizes of a batch and of a model, said when an embedding does not have the index that a batch asks for.

It takes torch's error; it adds a note with the largest token id and the sizes of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def note_sizes(error: IndexError, model: nn.Module, batch: Any) -> None:
    """Adds a note to the "index out of range" error of an embedding: the token ids in the batch and the model's sizes.

    Args:
        error: the error that gets the note.
        model: the model whose configuration has the sizes.
        batch: the batch whose largest token id is named.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    config: Any = getattr(model, "config", None)
    if isinstance(ids, Tensor) and ids.numel() and config is not None:
        words, places = (getattr(config, name, "?") for name in ("vocab_size", "max_position_embeddings"))
        has = f"{words} tokens and {places} positions"
        error.add_note(
            f"the batch has token ids up to {int(ids.max())} in rows of {ids.shape[-1]}; the model has {has}"
        )
