"""The split of a batch for a pipeline: inputs of the first stage, inputs of every stage, and rows of each micro-batch.

`step_inputs` takes a batch and returns `StepInputs`; `part_of` returns the rows of one micro-batch. All ranks of a
replica get the same batch, so a batch that cannot be split is refused on every rank before a stage runs. Only the last
stage uses the labels.

Shapes:
    B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forgather.errors import TrainingError
from forgather.ml.documents import Documents
from forgather.ml.model_inputs import inputs_of, known_documents
from forgather.ml.types import PaddingBatch

_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values")
# Arguments of models for padding-free batches, in which all documents are in a single row.
_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "seq_idx")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of the stages for one batch.

    Args:
        first: the positional inputs of the first stage.
        every: the keyword inputs of every stage, such as positions and masks.
        documents: the documents of the rows, which the host knows; None if it does not.

    Shapes:
        each tensor: (B, ...).
    """

    first: tuple[Tensor, ...]
    every: dict[str, Tensor]
    documents: Documents | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.first[0].shape[0])

    @property
    def shape(self) -> tuple[Any, ...]:
        """A key that is equal for two batches if they can use the same buffers."""
        first = tuple((tuple(tensor.shape), tensor.dtype) for tensor in self.first)
        every = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(self.every.items()))
        return first, every


def step_inputs(batch: Any) -> StepInputs:
    """Returns the inputs of the stages: all entries of a batch except the labels.

    Args:
        batch: the batch, as the collator returned it or as `LossRule.prepared` returned it.

    Shapes:
        each input in the batch: (B, ...), or (1, ...) if one row is used for all rows. Each input in the result: (B,
            ...).

    Raises:
        TrainingError: FG764 if a pipeline cannot split the batch by rows.
    """
    if isinstance(batch, PaddingBatch):
        return step_inputs(batch.batch)
    inputs = inputs_of(batch)
    if isinstance(inputs, Tensor):
        return StepInputs((inputs,), {})
    if isinstance(inputs, tuple | list):
        if len(inputs) != 1:
            raise _refusal(
                f"the batch is a tuple with {len(inputs)} inputs, and the first stage takes one",
                "return a mapping of names to tensors from the data collator",
            )
        _refuse_unsplit("0", inputs[0])
        return StepInputs(tuple(inputs), {})
    # The mask of packed rows is None: with a mask, transformers would ignore their document boundaries.
    inputs = {name: item for name, item in inputs.items() if item is not None}
    for name, item in inputs.items():
        _refuse_unsplit(name, item)
    main = next((name for name in _MAIN_INPUTS if name in inputs), next(iter(inputs), None))
    if main is None:
        raise _refusal("the batch has no inputs besides its labels", "check what the data collator returns")
    rows = inputs[main].shape[0]
    every = {name: _expanded_rows(name, item, rows) for name, item in inputs.items() if name != main}
    return StepInputs((inputs[main],), every, known_documents(batch))


def _refuse_unsplit(name: str, item: Any) -> None:
    if name in _FLATTENED:
        raise _refusal(
            f"the batch has {name!r}: its rows are flattened into one, and a pipeline splits batches by rows",
            "pack documents into rows of fixed length (collators/packed.yaml)",
        )
    if not isinstance(item, Tensor) or item.ndim == 0:
        kind = "a number" if isinstance(item, Tensor) else f"a {type(item).__name__}"
        raise _refusal(
            f"the batch has {name!r}, which is {kind}, and a pipeline splits tensors by rows",
            "leave it out in the data collator, or make it a tensor with one entry per row",
        )


def _expanded_rows(name: str, tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor
    if tensor.shape[0] == 1:
        # torch splits keyword inputs by rows as well, so a row that stands for all is repeated, without a copy.
        return tensor.expand(rows, *tensor.shape[1:])
    raise _refusal(
        f"the batch has {rows} rows, and {name!r} has {tensor.shape[0]}",
        "return tensors with one entry per row from the data collator",
    )


def _refusal(message: str, hint: str) -> TrainingError:
    return TrainingError(message, code="FG764", hint=hint)


def part_of(batch: Any, index: int, size: int) -> Any:
    """Returns rows `index * size` to `(index + 1) * size` of a batch.

    Args:
        batch: a batch of any form that a strategy accepts.
        index: the number of the part.
        size: the number of rows in a part.

    Shapes:
        each tensor in the batch: (B, ...), or (1, ...) if one row is used for all rows. In the result: (size, ...), or
            (1, ...) unchanged.
    """
    if isinstance(batch, PaddingBatch):
        return PaddingBatch(part_of(batch.batch, index, size))

    def taken(item: Any) -> Any:
        # A single row stands for all rows and belongs to every part.
        splits = isinstance(item, Documents) or (isinstance(item, Tensor) and item.ndim > 0 and item.shape[0] > 1)
        return item[index * size : (index + 1) * size] if splits else item

    if isinstance(batch, Mapping):
        return {name: taken(item) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)([taken(item) for item in batch])
    return taken(batch)
