"""Collators and data sets that fit a model's inputs.

Takes a model, a data set and optionally a collator; gives the data set without columns that the model does not name,
and the collator. With `remove_unused_columns: false` all columns stay for the user's collator. Labels of the rows are
never overwritten. Packed rows for a model that would mix their documents give a warning.
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
from forgather.ml.documents import any_packed, warn_mixed, why_mixed
from forgather.ml.losses import IGNORE_INDEX, is_causal_lm

_LABELS = ("label", "label_ids", "labels")
_LOOKED_AT = 64

Collate = Callable[[list[Any]], Any]


def default_collate(processing_class: Any) -> Collate:
    """Returns the default collator: padding where there is a tokenizer, else stacking.

    Args:
        processing_class: a tokenizer or processor; None for none.
    """
    pads = callable(getattr(processing_class, "pad", None))
    # `DataCollatorWithPadding` pads no labels of tokens; `PaddingCollator` does.
    for_tokens: Collate = PaddingCollator(processing_class) if pads else default_data_collator
    for_mappings: Collate = DataCollatorWithPadding(processing_class) if pads else default_data_collator

    def collate(rows: list[Any]) -> Any:
        if isinstance(rows[0], Mapping):
            return for_tokens(rows) if "input_ids" in rows[0] else for_mappings(rows)
        return torch.utils.data.default_collate(rows)

    return collate


def inputs_for_model(
    model: nn.Module, dataset: Any, collate: Collate, *, narrows: bool, own_collator: bool
) -> tuple[Any, Collate]:
    """Returns a data set and its collator in the form that the model needs.

    Args:
        model: the model to train.
        dataset: rows.
        collate: makes a micro-batch of rows.
        narrows: leave out the columns that the model does not name.
        own_collator: the user gave the collator; it gets all columns of a data set that cannot be narrowed itself.
    """
    warn_mixed_rows(model, dataset)
    collate = protecting_rows(collate, model)
    known = known_columns(model) if narrows else None
    if known is None:
        return dataset, collate
    narrowed = without_unused_columns(dataset, known)
    if narrowed is not dataset or own_collator:
        return narrowed, collate
    return dataset, KnownColumns(collate, known)


def known_columns(model: nn.Module) -> frozenset[str] | None:
    """Returns the argument names of a model's forward, and the names of labels; None for a model that names none.

    A wrapper that passes on further inputs by `**`, as peft's, also knows the names of the model that it wraps.
    """
    named = [name for one in (model, *_wrapped(model)) for name in _named(one)]
    # Labels are added in any case: a `loss_fn` needs them, also where `forward` does not take them.
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


def warn_mixed_rows(model: nn.Module, dataset: Any) -> None:
    """Warns if rows of a data set hold several documents and the model's attention would mix them.

    Reads at most 64 rows. Batches of a stream, or of a collator that packs, are checked by `ModelInputs.prepared`.

    Args:
        model: the model to train; its attention decides whether documents are mixed.
        dataset: rows, packed if they have `position_ids`.
    """
    if (reason := why_mixed(model)) is not None and any_packed(_first_positions(dataset)):
        warn_mixed(model, reason)


def _first_positions(dataset: Any) -> list[Any]:
    if isinstance(dataset, list):
        rows = itertools.islice(dataset, _LOOKED_AT)
        return [row["position_ids"] for row in rows if isinstance(row, Mapping) and "position_ids" in row]
    if "position_ids" in (getattr(dataset, "column_names", None) or ()) and hasattr(dataset, "select_columns"):
        # Selected first: indexing a row of `datasets` decodes all of its columns, images included.
        column = dataset.select_columns(["position_ids"])
        return list(column[:_LOOKED_AT]["position_ids"]) if hasattr(column, "__getitem__") else []
    return []


def has_new_boundaries(dataset: Any) -> bool:
    """Returns whether rows have the document boundaries that `tokenize` writes; earlier releases wrote none."""
    names = {*(getattr(dataset, "column_names", None) or ())}
    if not {"input_ids", "labels"} <= names <= {"input_ids", "labels", "position_ids"} or not len(dataset):
        return False
    return int(dataset[0]["labels"][0]) == IGNORE_INDEX


def without_unused_columns(dataset: Any, known: frozenset[str] | None) -> Any:
    """Returns a data set of `datasets` without the columns that the model does not name; any other as it is.

    Args:
        dataset: rows.
        known: names that the model takes; None keeps all columns.
    """
    names = getattr(dataset, "column_names", None)
    if known is None or not isinstance(names, list) or not hasattr(dataset, "select_columns"):
        return dataset
    kept = [name for name in names if name in known]
    # If nothing would be left, the collator builds the inputs from other columns, and needs them.
    return dataset.select_columns(kept) if kept and len(kept) < len(names) else dataset


class KnownColumns:
    """A collator that passes only the items that the model names to another collator."""

    def __init__(self, collate: Collate, known: frozenset[str]) -> None:
        self.collate = collate
        self.known = known

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the micro-batch of `rows`."""
        if not isinstance(rows[0], Mapping):
            return self.collate(rows)
        return self.collate([{name: row[name] for name in row if name in self.known} for row in rows])


def protecting_rows(collate: Collate, model: nn.Module) -> Collate:
    """Returns a collator that refuses rows whose labels or positions it would overwrite; any other as it is.

    Args:
        collate: a collator of transformers or of the user.
        model: decides whether masked-token labels make sense.

    Raises:
        TrainingError: FG846 for a collator that masks tokens (masked language modeling), given to a causal model.
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
    # A subclass with a `torch_call` of its own may keep labels, so only the original method is refused.
    overwrites = type(collate).torch_call is DataCollatorForLanguageModeling.torch_call and not collate.mlm
    return RefusesLabels(collate) if overwrites else collate


class RefusesPacked:
    """A flattening collator that refuses rows which hold several documents already.

    It writes `position_ids` row by row, which would remove the boundaries within a row.
    """

    def __init__(self, collate: DataCollatorWithFlattening) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the micro-batch of `rows`.

        Raises:
            TrainingError: FG858 for rows of several documents.
        """
        if any_packed(row["position_ids"] for row in rows if isinstance(row, Mapping) and "position_ids" in row):
            raise TrainingError(
                f"the rows hold several documents, and {type(self.collate).__name__} treats each row as one document",
                code="FG858",
                hint="use collators/packed.yaml for packed rows, or rows of one document (tokenize_examples)",
            )
        return self.collate(rows)


class RefusesLabels:
    """A collator that makes labels from the inputs, and refuses rows that have labels already."""

    def __init__(self, collate: DataCollatorForLanguageModeling) -> None:
        self.collate = collate
        self.tokenizer = collate.tokenizer  # transformers saves the tokenizer of a collator

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
