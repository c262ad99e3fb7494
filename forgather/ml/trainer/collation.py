"""Adapts a data set and its collator to the inputs of a model.

Columns that are not arguments of the model's `forward` are removed, unless `remove_unused_columns` is false. A collator
that would overwrite the labels of the rows is refused. A warning is given if rows contain several documents and the
model's attention would cross document boundaries.
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
from forgather.ml.batch_dependence import has_auxiliary_loss, warn_of_auxiliary_loss
from forgather.ml.data.padding import PaddingCollator
from forgather.ml.documents import any_packed, warn_mixed, why_mixed
from forgather.ml.losses import IGNORE_INDEX, is_causal_lm
from forgather.ml.trainer.row_fit import refuse_unfit_rows

_LABELS = ("label", "label_ids", "labels")
_LOOKED_AT = 64

Collate = Callable[[list[Any]], Any]


_DRAWS_NOTHING = "_forgather_draws_nothing"


def is_default_collate(collate: Any) -> bool:
    """Returns whether a collator is one that `default_collate` returned, which draws no random numbers."""
    return hasattr(collate, _DRAWS_NOTHING)


def default_collate(processing_class: Any) -> Collate:
    """Returns the default collator, which pads rows if there is a tokenizer, and otherwise stacks them.

    Args:
        processing_class: a tokenizer or processor, or None.
    """
    pads = callable(getattr(processing_class, "pad", None))
    # `DataCollatorWithPadding` pads no labels of tokens; `PaddingCollator` does.
    for_tokens: Collate = PaddingCollator(processing_class) if pads else default_data_collator
    for_mappings: Collate = DataCollatorWithPadding(processing_class) if pads else default_data_collator

    def collate(rows: list[Any]) -> Any:
        if isinstance(rows[0], Mapping):
            return for_tokens(rows) if "input_ids" in rows[0] else for_mappings(rows)
        return torch.utils.data.default_collate(rows)

    setattr(collate, _DRAWS_NOTHING, True)
    return collate


def inputs_for_model(
    model: nn.Module, dataset: Any, collate: Collate, *, narrows: bool, own_collator: bool
) -> tuple[Any, Collate]:
    """Returns the data set and the collator, changed so that they give the inputs that the model takes.

    Args:
        model: the model to train.
        dataset: the data set.
        collate: the collator, a function from a list of rows to a micro-batch.
        narrows: whether to remove columns that are not arguments of the model's `forward`.
        own_collator: whether the user gave the collator. A user's collator gets all columns of a data set whose columns
            cannot be selected.

    Raises:
        TrainingError: FG784 or FG785 from `refuse_unfit_rows`, FG846 or FG960 from `protecting_rows`, FG944 from
            `warn_mixed_rows`.
    """
    refuse_unfit_rows(model, dataset)
    warn_mixed_rows(model, dataset)
    collate = protecting_rows(collate, model)
    known = known_columns(model) if narrows else None
    if known is None:
        return dataset, collate
    # A collator that makes the inputs from other columns names these.
    known |= getattr(collate, "columns", frozenset())
    narrowed = without_unused_columns(dataset, known)
    if narrowed is not dataset or own_collator:
        return narrowed, collate
    return dataset, KnownColumns(collate, known)


def known_columns(model: nn.Module) -> frozenset[str] | None:
    """Returns the argument names of a model's `forward`, and the usual column names of labels.

    None if `forward` has no named arguments. If the model is a wrapper whose `forward` takes `**kwargs` (as peft's),
    the argument names of the wrapped model are included.
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
    """Warns if rows contain several documents and the model's attention would cross the document boundaries.

    It also warns if the loss of the model includes a term of a whole micro-batch, which depends on packing.

    Rows that `pack_examples` made are refused: packing must not change what an example teaches.

    Reads at most 64 rows. `ModelInputs.prepared` checks the batches of iterable data sets and of collators that pack
    documents.

    Args:
        model: the model to train, whose attention implementation determines whether attention crosses boundaries.
        dataset: the data set; document boundaries are found from the column `position_ids`.

    Raises:
        TrainingError: FG944 if the rows are packed examples.
    """
    if has_auxiliary_loss(model) and any_packed(_first_positions(dataset)):
        warn_of_auxiliary_loss(model, "the rows hold several documents")
    if (reason := why_mixed(model)) is None:
        return
    # Here: it imports `datasets`, for which a run without rows of that kind does not wait.
    from forgather.ml.data.example_packing import holds_packed_examples

    if holds_packed_examples(dataset):
        raise TrainingError(
            f"the rows hold several examples, and {type(model).__name__} does not keep them apart ({reason}): an "
            "answer would be trained with the conversations before its own in view",
            code="FG944",
            hint="set packing: false, or train a model that keeps them apart",
        ).about("train_dataset")
    if any_packed(_first_positions(dataset)):
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
    """Returns whether the rows have the document boundaries that `tokenize` writes; earlier releases wrote none."""
    names = {*(getattr(dataset, "column_names", None) or ())}
    if not {"input_ids", "labels"} <= names <= {"input_ids", "labels", "position_ids"} or not len(dataset):
        return False
    return int(dataset[0]["labels"][0]) == IGNORE_INDEX


def without_unused_columns(dataset: Any, known: frozenset[str] | None) -> Any:
    """Returns a `datasets` data set without the columns that the model does not take.

    A data set of another library is returned itself, because its columns cannot be selected.

    Args:
        dataset: the data set.
        known: the names of the columns that the model takes; None keeps all columns.
    """
    names = getattr(dataset, "column_names", None)
    if known is None or not isinstance(names, list) or not hasattr(dataset, "select_columns"):
        return dataset
    kept = [name for name in names if name in known]
    # If nothing would be left, the collator builds the inputs from other columns, and needs them.
    return dataset.select_columns(kept) if kept and len(kept) < len(names) else dataset


class KnownColumns:
    """A collator that removes from each row the items that the model does not take, and calls another collator."""

    def __init__(self, collate: Collate, known: frozenset[str]) -> None:
        self.collate = collate
        self.known = known

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the micro-batch that the other collator makes of `rows` without the removed items."""
        if not isinstance(rows[0], Mapping):
            return self.collate(rows)
        return self.collate([{name: row[name] for name in row if name in self.known} for row in rows])


def protecting_rows(collate: Collate, model: nn.Module) -> Collate:
    """Returns a collator that raises an error instead of overwriting labels or positions of rows.

    The result calls `collate`, but first checks the rows. A collator that overwrites neither labels nor positions is
    returned itself.

    Args:
        collate: the collator, of transformers or of the user.
        model: the model to train; a causal language model cannot learn from masked tokens.

    Raises:
        TrainingError: FG846 if the collator masks tokens (masked language modeling) and the model is causal; FG960 if
            it makes rows of a language model, and the model is a classifier or has an encoder and a decoder.
    """
    if isinstance(collate, DataCollatorWithFlattening | DataCollatorForLanguageModeling) and _has_other_labels(model):
        raise TrainingError(
            f"{type(collate).__name__} makes rows of a language model, and overwrites the labels that "
            f"{type(model).__name__} learns",
            code="FG960",
            hint="use collators/rows.yaml (forgather.ml.data:PaddingCollator), which keeps labels",
        )
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


def _has_other_labels(model: nn.Module) -> bool:
    """Returns whether the labels of a model are not the tokens of its input."""
    config = getattr(model, "config", None)
    return getattr(config, "is_encoder_decoder", False) or str(getattr(model, "loss_type", "")).endswith(
        "Classification"
    )


class RefusesPacked:
    """A collator that raises an error for rows that contain several documents, and flattens all other rows.

    `DataCollatorWithFlattening` writes new `position_ids` for each row, which would remove the document boundaries
    within a row.
    """

    def __init__(self, collate: DataCollatorWithFlattening) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the micro-batch of `rows`.

        Raises:
            TrainingError: FG858 if a row contains several documents.
        """
        if any_packed(row["position_ids"] for row in rows if isinstance(row, Mapping) and "position_ids" in row):
            raise TrainingError(
                f"the rows hold several documents, and {type(self.collate).__name__} treats each row as one document",
                code="FG858",
                hint="use collators/packed.yaml for packed rows, or rows of one document (tokenize_examples)",
            )
        return self.collate(rows)


class RefusesLabels:
    """A collator that makes labels from the inputs, and raises an error for rows that already have labels."""

    def __init__(self, collate: DataCollatorForLanguageModeling) -> None:
        self.collate = collate
        self.tokenizer = collate.tokenizer  # transformers saves the tokenizer of a collator

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the micro-batch of `rows`.

        Raises:
            TrainingError: FG846 if the rows have labels.
        """
        if isinstance(rows[0], Mapping) and "labels" in rows[0]:
            raise TrainingError(
                f"the rows have labels, and {type(self.collate).__name__} overwrites them with the inputs: the loss "
                "would be on prompts and padding too",
                code="FG846",
                hint="use collators/padded.yaml (forgather.ml.data:CausalLMCollator), which keeps labels",
            )
        return self.collate(rows)
