"""Predictions of an evaluation set: what `compute_metrics` gets, with each row once, in the order of the rows.

Takes the outputs of the model for the micro-batches of this rank; gives a `transformers.EvalPrediction` of the rows of
all ranks, as numpy arrays. As in transformers, predictions are all entries of the model's output except the loss and
the entries of `keys_to_ignore_at_inference`: one array, or a tuple if there are several. Arrays of batches of
different lengths are padded in the second dimension with -100.

Outputs are moved to host memory batch by batch and gathered over gloo at the end of the set, so an evaluation needs no
more device memory than without metrics. Padding rows are never gathered.

Shapes:
    B rows of a micro-batch, N rows of the set, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import EvalPrediction
from transformers.utils.generic import find_labels

from forgather.errors import TrainingError
from forgather.ml.distributed import collectives
from forgather.ml.losses import labels_of
from forgather.ml.model_inputs import inputs_of
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.batch_sampler import PreparedBatch
from forgather.ml.types import Evaluated

PADDING = -100
"""The value that fills up shorter arrays, as in transformers."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The predictions of some rows, in host memory. Each field is a tensor or a nested tuple of tensors.

    Args:
        predictions: the outputs of the model, or what `preprocess_logits_for_metrics` made of them.
        labels: the labels as the collator returned them; None if the rows have none.
        inputs: the main input of the model; None unless `include_for_metrics` contains "inputs".
        losses: for each row the mean loss of its micro-batch; None unless `include_for_metrics` contains "loss".

    Shapes:
        each tensor: (B, ...).
    """

    predictions: Any
    labels: Any
    inputs: Any = None
    losses: Tensor | None = None

    def __len__(self) -> int:
        return next(leaves(self.predictions)).shape[0]

    @property
    def num_bytes(self) -> int:
        """The size of the predictions."""
        return sum(tensor.numel() * tensor.element_size() for tensor in leaves(self.predictions))

    def as_arrays(self) -> EvalPrediction:
        """Returns the rows as numpy arrays. bfloat16, which numpy lacks, becomes float32."""
        return EvalPrediction(*(nested(_array, part) for part in self._parts))

    def as_tensors(self) -> EvalPrediction:
        """Returns the rows as tensors, which is what transformers passes with `batch_eval_metrics`."""
        return EvalPrediction(*self._parts)

    @property
    def _parts(self) -> tuple[Any, Any, Any, Any]:
        return self.predictions, self.labels, self.inputs, self.losses


class RowReader:
    """Reads the predictions of micro-batches from the outputs of one model.

    Args:
        model: the model, whose class determines the names of labels and the entries of the output to leave out.
        preprocess: the user's `preprocess_logits_for_metrics`, a function of (logits, labels), or None.
        include: the values of `include_for_metrics`.
        ignore_keys: the entries of the output to leave out; by default those that the configuration of the model names.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        preprocess: Callable[..., Any] | None = None,
        include: Sequence[str] = (),
        ignore_keys: Sequence[str] | None = None,
    ) -> None:
        # The stages of a pipeline, and adapters, are called instead of the model whose class has the names.
        model = getattr(model, "stands_for", model)
        inner: Any = getattr(model, "get_base_model", None)
        labelled = type(inner() if callable(inner) else model)
        self._names: list[str] = find_labels(labelled)  # type: ignore[no-untyped-call]
        self._main = str(getattr(model, "main_input_name", "input_ids"))
        config = getattr(model, "config", None)
        default = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        self._ignored = frozenset(default if ignore_keys is None else ignore_keys)
        self._preprocess = preprocess
        self._include = frozenset(include)

    def labels(self, batch: Any) -> Any:
        """Returns the labels of a micro-batch: a tensor, a tuple if the model has several labels, or None.

        Args:
            batch: the micro-batch as the collator returned it.

        Shapes:
            Returns (B, ...) tensors.
        """
        if isinstance(batch, Mapping) and self._names:
            found = tuple(batch.get(name) for name in self._names)
            if all(isinstance(one, Tensor) for one in found):
                return found if len(found) > 1 else found[0]
        return labels_of(batch)

    def read(self, ready: PreparedBatch, output: Any, loss: Tensor | None = None) -> Rows:
        """Returns the predictions of a micro-batch, without its padding rows.

        Args:
            ready: the micro-batch.
            output: the output of the model for the micro-batch, without the loss.
            loss: the mean loss of the micro-batch, or None.

        Shapes:
            output: (B, ...) tensors; loss: a scalar tensor.

        Raises:
            TrainingError: FG872 if the output has no tensors, or a tensor without one entry per row.
        """
        labels = self.labels(ready.collated)
        predictions = self._kept(output)
        if self._preprocess is not None:
            device = next((tensor.device for tensor in leaves(predictions)), None)
            predictions = self._preprocess(predictions, nested(lambda tensor: tensor.to(device), labels))
        count = ready.num_rows
        taken = [nested(lambda tensor: _of_rows(tensor, count), part) for part in (predictions, labels)]
        _refuse_others(taken[0])
        inputs = _of_rows(self._main_input(ready.collated), count) if "inputs" in self._include else None
        losses = loss.detach().cpu().expand(count).clone() if "loss" in self._include and loss is not None else None
        return Rows(taken[0], taken[1], inputs, losses)

    def _kept(self, output: Any) -> Any:
        if isinstance(output, Mapping):
            output = tuple(value for name, value in output.items() if name not in self._ignored and value is not None)
        if isinstance(output, tuple | list):
            return output[0] if len(output) == 1 else tuple(output)
        return output

    def _main_input(self, batch: Any) -> Tensor:
        inputs = inputs_of(batch)
        if isinstance(inputs, Mapping):
            inputs = inputs.get(self._main)
        found = inputs[0] if isinstance(inputs, tuple | list) and inputs else inputs
        if isinstance(found, Tensor):
            return found
        raise _unusable(f"include_for_metrics names 'inputs', and the batch has no {self._main!r}")


class PredictionCollector:
    """The predictions of one evaluation set: reads them batch by batch, and gathers them from the ranks.

    Collective: every rank must construct it, and must call its methods for each of its micro-batches.

    Args:
        strategy: the strategy, which has the model, and whose topology determines which ranks have outputs.
        preprocess: the user's `preprocess_logits_for_metrics`, a function of (logits, labels), or None.
        include: the values of `include_for_metrics`.
        ignore_keys: the entries of the output to leave out; by default those that the configuration of the model names.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        preprocess: Callable[..., Any] | None = None,
        include: Sequence[str] = (),
        ignore_keys: Sequence[str] | None = None,
    ) -> None:
        self._reader = RowReader(strategy.view, preprocess=preprocess, include=include, ignore_keys=ignore_keys)
        self._kept: list[Rows | None] = []
        topology = strategy.topology
        every = collectives.all_gather((topology.dp_rank, topology.has_loss))
        # All ranks of a replica read the same rows, and several of them may have the output: the first one sends it.
        first: dict[int, int] = {}
        for rank, (replica, has_loss) in enumerate(every):
            if has_loss:
                first.setdefault(replica, rank)
        self._senders = [first[replica] for replica in sorted(first)]
        self._sends = collectives.rank() in self._senders

    def has_labels(self, ready: PreparedBatch) -> bool:
        """Returns whether a micro-batch has labels."""
        return self._reader.labels(ready.collated) is not None

    def read(self, ready: PreparedBatch, found: Evaluated) -> Rows | None:
        """Returns the predictions of this rank's micro-batch, or None if another rank has them or it has no rows.

        Args:
            ready: the micro-batch.
            found: the result of its evaluation.

        Raises:
            TrainingError: FG872 if the output has no tensors, or a tensor without one entry per row.
        """

        def read() -> Rows | None:
            # Shards of a tensor-parallel output are gathered by all ranks that have one.
            output = nested(whole_tensor, found.output)
            if not self._sends or not ready.num_rows:
                return None
            return self._reader.read(ready, output, found.loss / found.num_valid)

        # A function of the user that fails on one rank must end all of them.
        return collectives.run_collectively(read)

    def add(self, rows: Rows | None) -> None:
        """Keeps the rows that `read` returned for a micro-batch."""
        self._kept.append(rows)

    def gather(self) -> Rows:
        """Returns the kept rows of all ranks, in the order of the data set."""
        return self._gathered(self._kept)

    def gather_batch(self, rows: Rows | None) -> Rows:
        """Returns the rows of one micro-batch of all ranks. The rows are not kept."""
        return self._gathered([rows])

    def _gathered(self, own: Sequence[Rows | None]) -> Rows:
        every = collectives.all_gather(list(own) if self._sends else None)
        # A global micro-batch consists of the micro-batches of data-parallel ranks 0, 1, and so on.
        in_order = [rows for step in zip(*(every[rank] or () for rank in self._senders), strict=True) for rows in step]
        return joined([rows for rows in in_order if rows is not None])


def joined(parts: Sequence[Rows]) -> Rows:
    """Returns the rows of several parts as one; shorter arrays are padded with -100 in the second dimension."""
    first = parts[0]
    return Rows(
        joined_tensors([part.predictions for part in parts]),
        joined_tensors([part.labels for part in parts]) if first.labels is not None else None,
        joined_tensors([part.inputs for part in parts]) if first.inputs is not None else None,
        joined_tensors([part.losses for part in parts]) if first.losses is not None else None,
    )


def joined_tensors(parts: Sequence[Any]) -> Any:
    """Returns the concatenation of nested tensors of equal structure, padded with -100 in the second dimension.

    Shapes:
        each tensor: (B, ...) or (B, T, ...). Returns (N, ...) or (N, longest T, ...).

    Example:
        >>> joined_tensors([torch.zeros(1, 1), torch.ones(1, 2)]).tolist()
        [[0.0, -100.0], [1.0, 1.0]]
    """
    if isinstance(parts[0], tuple | list):
        return tuple(joined_tensors(column) for column in zip(*parts, strict=True))
    if isinstance(parts[0], Mapping):
        return {name: joined_tensors([part[name] for part in parts]) for name in parts[0]}
    if parts[0].ndim < 2:
        return torch.cat(list(parts))
    other = next((part for part in parts if part.shape[2:] != parts[0].shape[2:]), None)
    if other is not None:
        shapes = f"{tuple(parts[0].shape)} and {tuple(other.shape)}"
        raise _unusable(f"the predictions of two batches have the shapes {shapes}, and only the second size may differ")
    longest = max(part.shape[1] for part in parts)
    return torch.cat([_padded(part, longest) for part in parts])


def _padded(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[1]
    if missing and tensor.dtype in (torch.bool, torch.uint8):
        # Neither can hold -100.
        tensor = tensor.long()
    return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing), value=PADDING) if missing else tensor


def leaves(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a nested tuple, list or mapping."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)


def nested(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns a nested tuple, list or mapping with `change` applied to each of its tensors.

    Lists become tuples, and mappings become dicts. Values of other types are left as they are.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: nested(change, item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(nested(change, item) for item in value)
    return value


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor without gradients, gathered if tensor parallelism has split it over the ranks of the replica.

    Shapes:
        tensor: any shape. Returns the same shape.
    """
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _refuse_others(predictions: Any) -> None:
    if isinstance(predictions, Tensor):
        return
    items = predictions if isinstance(predictions, tuple) else (predictions,)
    wrong = [item for item in items if not isinstance(item, Tensor | tuple | dict)]
    if wrong or not items:
        found = f"a {type(wrong[0]).__name__}, which is not a tensor" if wrong else "no tensors"
        raise _unusable(f"the predictions contain {found}")


def _of_rows(tensor: Tensor, count: int) -> Tensor:
    # More entries than rows, as of flattened logits, could not be told apart by row.
    if tensor.ndim == 0 or tensor.shape[0] != count:
        shape = "a number" if tensor.ndim == 0 else f"a tensor of shape {tuple(tensor.shape)}"
        raise _unusable(f"the predictions of {count} rows contain {shape}")
    return tensor.cpu()


def _array(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _unusable(message: str) -> TrainingError:
    return TrainingError(
        message,
        code="FG872",
        hint="give preprocess_logits_for_metrics: it gets (outputs, labels) and returns tensors with one entry per row",
    )
