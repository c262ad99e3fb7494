"""From rows to the inputs of a model.

Takes a model, a data set and perhaps a collator; gives the data set without the columns that the model
does not know, and the collator. Keeps true: a column that a collator of the user's own may need stays
when `remove_unused_columns` is off.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator

_LABELS = ("label", "label_ids", "labels")

Collate = Callable[[list[Any]], Any]


def default_collate(processing_class: Any) -> Collate:
    """Returns the collator for rows without one: padding where there is a tokenizer, else stacking."""
    pads = callable(getattr(processing_class, "pad", None))
    for_mappings: Collate = DataCollatorWithPadding(processing_class) if pads else default_data_collator

    def collate(rows: list[Any]) -> Any:
        if isinstance(rows[0], Mapping):
            return for_mappings(rows)
        return torch.utils.data.default_collate(rows)

    return collate


def known_columns(model: nn.Module) -> frozenset[str] | None:
    """Returns the inputs that a model names, with the names of labels; None where it takes anything."""
    parameters = inspect.signature(model.forward).parameters
    named = [name for name, kind in parameters.items() if kind.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)]
    return frozenset([*named, *_LABELS]) if named else None


def without_unused_columns(dataset: Any, known: frozenset[str] | None) -> Any:
    """Returns a data set of `datasets` without the columns that the model does not name."""
    names = getattr(dataset, "column_names", None)
    if known is None or not isinstance(names, list) or not hasattr(dataset, "select_columns"):
        return dataset
    kept = [name for name in names if name in known]
    return dataset.select_columns(kept) if kept and len(kept) < len(names) else dataset


class KnownColumns:
    """A collator that gives another collator only the items of a row that the model names."""

    def __init__(self, collate: Collate, known: frozenset[str]) -> None:
        self.collate = collate
        self.known = known

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the micro-batch of `rows`."""
        if not isinstance(rows[0], Mapping):
            return self.collate(rows)
        return self.collate([{name: row[name] for name in row if name in self.known} for row in rows])
