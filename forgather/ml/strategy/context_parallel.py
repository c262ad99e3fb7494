"""Context parallelism: the positions of each row, divided over the ranks of a group.

The ranks of a group read the same rows. `SequenceParts.part` takes a prepared batch of whole rows, whose labels are
shifted already, and gives the part of one rank: its positions of the tokens and of the labels, and the position of each
token in its document. The loss of a group is the sum of the losses of its parts, and the gradients are summed over the
group together with those of the replicas, so both are those of whole rows.

`refuse_model` decides which models can be divided in this way: those of `context_models.json`, which were compared with
one process.

Shapes:
    B rows, T positions of a whole row, S = T / size positions of one rank.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from forgather.errors import DistributedError, TrainingError
from forgather.ml.context_attention import Ulysses, WholeRows
from forgather.ml.context_ring import Ring, refusal
from forgather.ml.distributed.layout import Layout
from forgather.ml.documents import Documents, families_of
from forgather.ml.label_kind import LabelKind
from forgather.ml.losses import IGNORE_INDEX, CausalTokenLoss, LossRule, UserLoss
from forgather.ml.model_class import class_name
from forgather.ml.model_inputs import DOCUMENTS, SHIFTED
from forgather.ml.strategy.base import Recipe
from forgather.ml.types import PaddingBatch
from forgather.parallel_sizes import uneven_heads
from forgather.ring_models import ring_obstacle
from forgather.rotary_types import rotary_type_by_length

_MODELS = Path(__file__).parent.parent / "context_models.json"
_KNOWN = frozenset({"input_ids", "attention_mask", "position_ids", SHIFTED, DOCUMENTS})
_WHOLE = "forgather.whole_rows"
"""The key of the `WholeRows` in the part of a batch."""
_INSTEAD = "remove context_parallel_size, and shard the weights (fsdp: true)"


ULYSSES, RING = "ulysses", "ring"
"""The values of `context_parallel_method`."""


class Exchange(Protocol):
    """What lets attention see the positions of other ranks: `Ulysses` or `Ring`."""

    row_multiple: int
    num_calls: int

    def own_positions(self, length: int) -> Tensor:
        """Returns the positions of a row that this rank has."""

    def attended(self, rows: WholeRows, targets_BT: Tensor | None) -> WholeRows:
        """Returns what attention must know of rows, or raises an error if it cannot follow it."""

    def exchanged_attention(self, rows: WholeRows) -> contextlib.AbstractContextManager[None]:
        """Replaces the attention functions of transformers."""


class SequenceParts:
    """Divides batches over the ranks of a context-parallel group.

    Args:
        group: the process group of the ranks that read the same rows.
        device: the device that the model computes on.
        method: how attention sees the positions of other ranks: "ulysses" or "ring".
        rotate_method: how a ring passes keys and values on: "allgather" or "alltoall".
    """

    def __init__(
        self, group: Any, device: torch.device, *, method: str = ULYSSES, rotate_method: str = "allgather"
    ) -> None:
        self._device = device
        self._exchange: Exchange = (
            Ring(group, device, rotate_method=rotate_method) if method == RING else Ulysses(group)
        )

    def part(self, batch: Any) -> Any:
        """Returns this rank's part of a prepared batch.

        Rows that cannot be divided evenly are extended by tokens that no other token sees, and whose labels are
        ignored.

        Args:
            batch: the prepared batch on the host, with shifted labels.

        Raises:
            TrainingError: FG709 if the batch has an entry of which it is not known how positions divide it; FG794 if
                the ring cannot compute the attention of its rows.
        """
        if isinstance(batch, PaddingBatch):
            return PaddingBatch(self.part(batch.batch))
        _refuse_batch(batch)
        documents: Documents = batch[DOCUMENTS]
        rows, length = documents.rows, documents.row_length
        added = -length % self._exchange.row_multiple
        extended = _extended_documents(documents, added)
        targets_BT = batch.get(SHIFTED)
        if targets_BT is not None:
            targets_BT = _extended(targets_BT, added, IGNORE_INDEX)
        whole = self._exchange.attended(_whole_rows(batch, extended, added), targets_BT)
        mine = self._exchange.own_positions(whole.length)
        positions_BT = batch.get("position_ids")
        if positions_BT is None:
            positions_BT = torch.arange(length)[None]
        part = {
            "input_ids": _extended(batch["input_ids"], added, 0)[:, mine],
            # The position is explicit: a model would count from the first token of the part.
            "position_ids": _with_positions(positions_BT, added)[:, mine].expand(rows, -1),
            # With a mask, transformers does not look for documents in the positions of the part.
            "attention_mask": torch.ones(rows, len(mine), dtype=torch.bool),
            # Those of whole rows: `attn_implementation: varlen` is given the borders of all positions.
            DOCUMENTS: extended,
            _WHOLE: whole,
        }
        if targets_BT is not None:
            part[SHIFTED] = targets_BT[:, mine]
        return part

    @contextlib.contextmanager
    def computing(self, batch: Any) -> Iterator[None]:
        """Context manager in which the model may be called with the part of a batch, and its loss differentiated.

        Args:
            batch: the part, as `part` returned it, on the device that the model computes on.

        Raises:
            TrainingError: FG709 if the model called no attention function of transformers.
        """
        part: Any = batch.batch if isinstance(batch, PaddingBatch) else batch
        whole: WholeRows = part[_WHOLE]
        before = self._exchange.num_calls
        with self._exchange.exchanged_attention(whole.to(self._device)):
            yield
        # Without an exchange, each rank would attend to its own part only, and the losses would look plausible.
        if self._exchange.num_calls == before:
            raise TrainingError(
                "the model computed attention without a call of transformers' attention functions: each rank attended "
                "to its own part of the rows",
                code="FG709",
                hint=_INSTEAD,
            )


def sequence_parts(
    model: nn.Module, rule: LossRule, recipe: Recipe, layout: Layout, group: Any, device: torch.device
) -> SequenceParts:
    """Returns what divides the rows of a model over the ranks of a context-parallel group.

    Args:
        model: the model, before it is wrapped for distributed training.
        rule: the loss rule of the model.
        recipe: the recipe of the model, which says how attention sees the positions of other ranks.
        layout: the parallel sizes of the run.
        group: the process group of the ranks that read the same rows.
        device: the device that the model computes on.

    Raises:
        DistributedError: FG757, FG758 or FG759 if the rows of this model cannot be divided.
    """
    sizes = {"size": layout.context_parallel_size, "tensor_size": layout.tensor_parallel_size}
    refuse_model(model, rule, **sizes, method=recipe.context_method)
    return SequenceParts(group, device, method=recipe.context_method, rotate_method=recipe.rotate_method)


def _refuse_batch(batch: Any) -> None:
    if not isinstance(batch, Mapping) or DOCUMENTS not in batch or "input_ids" not in batch:
        found = "a mapping without input_ids" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise TrainingError(
            f"the batch is {found}, which context_parallel_size cannot divide by positions",
            code="FG709",
            hint="give batches with input_ids and labels, as collators/padded.yaml does",
        )
    unknown = sorted(str(name) for name in batch if name not in _KNOWN and batch[name] is not None)
    mask = batch.get("attention_mask")
    dims = mask.ndim if isinstance(mask, Tensor) else 2
    if unknown or dims != 2:
        named = ", ".join(repr(name) for name in unknown) or f"an attention_mask of {dims} dimensions"
        raise TrainingError(
            f"the batch has {named}, and context_parallel_size divides only input_ids, labels, position_ids and an "
            "attention_mask of two dimensions by positions",
            code="FG709",
            hint="leave it out of the batch (remove_unused_columns: true), or remove context_parallel_size",
        )


def _extended_documents(documents: Documents, added: int) -> Documents:
    """Returns the documents of rows that are extended by some positions, which are a document of their own."""
    if not added or not documents.are_packed or documents.positions_BT is None:
        return documents
    positions_BT = _with_positions(documents.positions_BT, added)
    shape = (documents.rows, documents.row_length + added)
    return Documents(positions_BT, shape, padded_rows=documents.padded_rows)


def _whole_rows(batch: Mapping[str, Any], documents: Documents, added: int) -> WholeRows:
    """Returns what attention must know of the rows of a batch, extended by some positions.

    Args:
        batch: the prepared batch.
        documents: the documents of the extended rows.
        added: the number of positions by which the rows are extended.
    """
    length = batch["input_ids"].shape[1] + added
    mask_BT = batch.get("attention_mask")
    if isinstance(mask_BT, Tensor):
        # transformers ignores positions if there is a mask; `prepared` has removed the mask of packed rows.
        return WholeRows(length, visible_BT=_extended(mask_BT.bool(), added, False))
    if not documents.are_packed:
        # Later positions are invisible to earlier ones: what is added needs no mask.
        return WholeRows(length)
    assert documents.positions_BT is not None, "packed rows have positions"  # noqa: S101
    return WholeRows(
        length,
        documents_BT=documents.starts_BT.long().cumsum(dim=1) - 1,
        positions_BT=documents.positions_BT.expand(documents.rows, -1),
    )


def _extended(tensor_BT: Tensor, added: int, value: Any) -> Tensor:
    return F.pad(tensor_BT, (0, added), value=value) if added else tensor_BT


def _with_positions(positions_BT: Tensor, added: int) -> Tensor:
    """Returns positions, followed by those of the added tokens, which no table of positions is too short for."""
    further = torch.arange(added).expand(positions_BT.shape[0], -1)
    return torch.cat([positions_BT, further.to(positions_BT)], dim=1) if added else positions_BT


def proven_families() -> frozenset[str]:
    """Returns the model families of transformers that were compared with one process."""
    return frozenset(json.loads(_MODELS.read_text(encoding="utf-8"))["families"])


def refuse_model(model: nn.Module, rule: LossRule, *, size: int, tensor_size: int = 1, method: str = ULYSSES) -> None:
    """Raises an error if the rows of a model cannot be divided by positions.

    Args:
        model: the model, before it is wrapped for distributed training.
        rule: the loss rule of the model.
        size: the number of ranks that divide the positions.
        tensor_size: the number of ranks over which each layer is sliced.
        method: how attention sees the positions of other ranks: "ulysses" or "ring".

    Raises:
        DistributedError: FG757 if it was not proven that the model and its loss can be divided; FG758 if its heads
            cannot be divided evenly over the ranks that exchange them; FG759 if a ring does not compute its attention.
    """
    reason = _why_undividable(model, rule)
    if reason is not None:
        raise DistributedError(
            f"context_parallel_size is {size}, and {reason}", code="FG757", hint=_INSTEAD, found=size
        ).about("context_parallel_size")
    if method == RING:
        refuse_ring(model)
    else:
        refuse_heads(model, size=size, tensor_size=tensor_size)


def refuse_ring(model: nn.Module) -> None:
    """Raises an error if the attention of a model of a proven family is not causal attention over whole rows.

    Args:
        model: the model, before it is wrapped for distributed training.

    Raises:
        DistributedError: FG759 if the attention is another one, or has another implementation.
    """
    for part in model.modules():
        # The first family of a part is that of the part itself.
        if isinstance(part, PreTrainedModel) and (family := next(families_of(part), None)) is not None:
            found = ring_obstacle(family[0], vars(part.config), part.config._attn_implementation)
            if found is not None:
                raise refusal(*found)


def _why_undividable(model: nn.Module, rule: LossRule) -> str | None:
    name = class_name(model)
    families = dict(families_of(model))
    is_whole = isinstance(model, PreTrainedModel) or callable(getattr(model, "get_base_model", None))
    if not families or not is_whole:
        return f"{name} is not a model of transformers, whose attention can be exchanged"
    if unproven := sorted(families.keys() - proven_families()):
        return f"it was not measured that models of the family {unproven[0]!r} ({name}) give the result of one process"
    for part in model.modules():
        kind = rotary_type_by_length(vars(part.config)) if isinstance(part, PreTrainedModel) else None
        if kind is not None:
            return f"the rotary positions of {name} are of type {kind!r}, which depends on the length of a whole row"
    is_next_token = type(rule) is CausalTokenLoss or (
        type(rule) is UserLoss and rule.shifts and rule.label_kind in (None, LabelKind.NEXT_TOKEN)
    )
    if not is_next_token:
        return f"{type(rule).__name__} of {name} needs whole rows, unlike a loss of single tokens"
    return None


def refuse_heads(model: nn.Module, *, size: int, tensor_size: int = 1) -> None:
    """Raises an error if the heads of a model cannot be divided over the ranks.

    Args:
        model: the model, whose configuration has the numbers of heads.
        size: the number of ranks that divide the positions.
        tensor_size: the number of ranks over which each layer is sliced.

    Raises:
        DistributedError: FG758 if heads cannot be divided evenly.
    """
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(groups, int):
        return
    problem = uneven_heads(heads, groups, size=size, tensor_size=tensor_size)
    if problem is not None:
        raise DistributedError(problem[0], code="FG758", hint=problem[1], found=size).about("context_parallel_size")
