"""From rows to the inputs of a model.

Takes a model, a data set and perhaps a collator; gives the data set without the columns that the model
does not know, and the collator. Keeps true: a column that a collator of the user's own may need stays
when `remove_unused_columns` is off; labels that rows have reach the model; rows of several documents for a model that
mixes them are warned about.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.data.data_collator import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    default_data_collator,
)

from forgather.errors import TrainingError
from forgather.ml.data.padding import PaddingCollator
from forgather.ml.documents import any_packed, tell_mixed, why_mixed
from forgather.ml.losses import IGNORE_INDEX, is_causal_lm

_LABELS = ("label", "label_ids", "labels")
_LOOKED_AT = 64

Collate = Callable[[list[Any]], Any]


def default_collate(processing_class: Any) -> Collate:
    """Returns the collator for rows without one: padding where there is a tokenizer, else stacking."""
    pads = callable(getattr(processing_class, "pad", None))
    for_tokens: Collate = PaddingCollator(processing_class) if pads else default_data_collator
    for_mappings: Collate = DataCollatorWithPadding(processing_class) if pads else default_data_collator

    def collate(rows: list[Any]) -> Any:
        if isinstance(rows[0], Mapping):
            return for_tokens(rows) if "input_ids" in rows[0] else for_mappings(rows)
        return torch.utils.data.default_collate(rows)

    return collate


def rows_for(
    model: nn.Module, dataset: Any, collate: Collate, *, narrows: bool, own_collator: bool
) -> tuple[Any, Collate]:
    """Returns a data set and its collator as the model needs them.

    Args:
        model: what is trained.
        dataset: its rows.
        collate: rows to a micro-batch.
        narrows: leave out the columns that the model does not name.
        own_collator: the collator is the user's, and gets the columns of a data set that cannot be narrowed.
    """
    tell_mixed_rows(model, dataset)
    collate = keeping_rows(collate, model)
    known = known_columns(model) if narrows else None
    if known is None:
        return dataset, collate
    narrowed = without_unused_columns(dataset, known)
    if narrowed is not dataset or own_collator:
        return narrowed, collate
    return dataset, KnownColumns(collate, known)


def known_columns(model: nn.Module) -> frozenset[str] | None:
    """Returns the inputs that a model names, with the names of labels; None where it takes anything.

    A wrapper that takes further inputs by `**`, as peft's, hands them on: it knows what the model inside names.
    """
    named = [name for one in (model, *_wrapped(model)) for name in _named(one)]
    return frozenset([*named, *_LABELS]) if named else None


def _named(model: nn.Module) -> Iterator[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return (one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))


def _wrapped(model: nn.Module) -> list[nn.Module]:
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(model, PreTrainedModel) or not any(one.kind is one.VAR_KEYWORD for one in parameters):
        return []
    inner = getattr(model, "get_base_model", None)
    return [inner()] if callable(inner) else [part for part in model.children() if isinstance(part, PreTrainedModel)]


def tell_mixed_rows(model: nn.Module, dataset: Any) -> None:
    """Warns where rows of a data set hold several documents that the model mixes; a few of its rows are looked at.

    What a data set without positions, or a collator, gives is looked at when it comes (`ModelInputs.prepared`).
    """
    if (reason := why_mixed(model)) is not None and any_packed(_first_positions(dataset)):
        tell_mixed(model, reason)


def _first_positions(dataset: Any) -> list[Any]:
    if isinstance(dataset, list):
        rows = itertools.islice(dataset, _LOOKED_AT)
        return [row["position_ids"] for row in rows if isinstance(row, Mapping) and "position_ids" in row]
    if "position_ids" in (getattr(dataset, "column_names", None) or ()) and hasattr(dataset, "select_columns"):
        column = dataset.select_columns(["position_ids"])
        return list(column[:_LOOKED_AT]["position_ids"]) if hasattr(column, "__getitem__") else []
    return []


def has_new_boundaries(dataset: Any) -> bool:
    """Tells whether rows are those of `tokenize` with document boundaries, which earlier releases did not write."""
    names = {*(getattr(dataset, "column_names", None) or ())}
    if not {"input_ids", "labels"} <= names <= {"input_ids", "labels", "position_ids"} or not len(dataset):
        return False
    return int(dataset[0]["labels"][0]) == IGNORE_INDEX


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


def keeping_rows(collate: Collate, model: nn.Module) -> Collate:
    """Returns a collator that refuses rows whose labels or positions it would overwrite; any other collator as it is.

    Raises:
        TrainingError: FG846 for one that masks tokens at random, which a causal language model does not learn from.
    """
    if isinstance(collate, DataCollatorWithFlattening):
        return RefusesPacked(collate)
    if not isinstance(collate, DataCollatorForLanguageModeling):
        return collate
    if collate.mlm and is_causal_lm(model):
        raise TrainingError(
            f"{type(collate).__name__} masks tokens at random (mlm: true), and {type(model).__name__} learns the next "
            "token",
            code="FG846",
            hint="use collators/padded.yaml (forgather.ml.data:CausalLMCollator), or set mlm: false",
        )
    overwrites = type(collate).torch_call is DataCollatorForLanguageModeling.torch_call and not collate.mlm
    return RefusesLabels(collate) if overwrites else collate


class RefusesPacked:
    """A collator that writes positions row by row, and refuses rows that hold several documents already."""

    def __init__(self, collate: DataCollatorWithFlattening) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the micro-batch of `rows`.

        Raises:
            TrainingError: FG858 for rows of several documents.
        """
        if any_packed(row["position_ids"] for row in rows if isinstance(row, Mapping) and "position_ids" in row):
            raise TrainingError(
                f"the rows hold several documents, and {type(self.collate).__name__} takes each row for one",
                code="FG858",
                hint="use collators/packed.yaml for packed rows, or rows of one document (tokenize_examples)",
            )
        return self.collate(rows)


class RefusesLabels:
    """A collator that makes labels from the inputs, and refuses rows that have labels already."""

    def __init__(self, collate: DataCollatorForLanguageModeling) -> None:
        self.collate = collate
        self.tokenizer = collate.tokenizer  # transformers saves that of a collator

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the micro-batch of `rows`.

        Raises:
            TrainingError: FG846 for rows with labels.
        """
        if isinstance(rows[0], Mapping) and "labels" in rows[0]:
            raise TrainingError(
                f"the rows have labels, and {type(self.collate).__name__} overwrites them with the inputs: the loss "
                "would be on prompts and padding too",
                code="FG846",
                hint="use collators/padded.yaml (forgather.ml.data:CausalLMCollator), which keeps labels",
            )
        return self.collate(rows)
