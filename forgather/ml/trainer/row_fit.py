"""Refuses prepared tokens that a model cannot take: ids beyond its vocabulary, rows beyond its positions.

Takes a model and a data set. Rows that say nothing about their tokens pass: the run meets what they hold.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from forgather.errors import TrainingError


def refuse_unfit_rows(model: nn.Module, dataset: Any) -> None:
    """Raises an error if rows have token ids or lengths that a model has no weights for.

    Args:
        model: the model to train.
        dataset: the data set; what is compared are its attributes `largest_id` and `block_size`.

    Raises:
        TrainingError: FG784 if a token id is beyond the model's vocabulary; FG785 if a row is longer than the model's
            table of positions. Rotary positions have no table; for these, the run itself warns.
    """
    largest, length = getattr(dataset, "largest_id", None), getattr(dataset, "block_size", None)
    config: Any = getattr(model, "config", None)
    if type(largest) is not int or type(length) is not int or config is None:
        return
    words = getattr(config, "vocab_size", None)
    if type(words) is int and largest >= words:
        raise TrainingError(
            f"the prepared tokens have ids up to {largest}, and the vocabulary of {type(model).__name__} ends at "
            f"{words - 1}",
            code="FG784",
            hint="build the model with the size of the tokenizer of the data: vocab_size: !call:len [*tokenizer]",
        ).about("train_dataset")
    places = getattr(config, "max_position_embeddings", None)
    if type(places) is int and length > places and _has_table(model, places):
        raise TrainingError(
            f"the prepared rows have {length} tokens, and {type(model).__name__} has {places} positions",
            code="FG785",
            hint=f"set block_size to {places} or less: the data need not be prepared again",
        ).about("train_dataset")


def _has_table(model: nn.Module, places: int) -> bool:
    ask: Any = getattr(model, "get_input_embeddings", None)
    words = None if ask is None else ask()
    return any(
        isinstance(part, nn.Embedding) and part is not words and part.num_embeddings == places
        for part in model.modules()
    )
