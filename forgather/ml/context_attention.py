"""Ulysses: attention over whole rows while each rank computes all other layers for its part of the positions.

Each rank of a context-parallel group passes on its positions of all heads, and gets all positions of its heads, by one
all-to-all for queries, keys and values together. The attention function that the model is configured with then computes
these heads over the whole rows, under the masks that it has in one process. A second all-to-all returns the result to
the positions. Autograd differentiates both, so the gradients are those of one process.

`WholeRows` is what attention must know of the whole rows. `exchanged_attention` is a context manager in which
transformers' attention and mask functions are replaced; outside of it, models compute what they compute in one process.
It must include the backward pass, because activation checkpointing computes forward passes there.

Shapes:
    B rows, T positions of a whole row, S = T / size positions of one rank, H heads, D channels of a head.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, packed_sequence_compatibility_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forgather.errors import TrainingError

UNCHANGED = frozenset({"paged|eager"})
"""The attention functions that only text generation calls."""


@dataclass(frozen=True, slots=True)
class WholeRows:
    """What the attention of a context-parallel group must know of its whole rows.

    Args:
        length: the number of positions of a row.
        visible_BT: a mask that is False at padding; None if the rows have no padding or are packed.
        documents_BT: the number of the document of each token, counted from 0 in each row; None if each row is one
            document.
        positions_BT: the position of each token in its document; None if each row is one document.

    Shapes:
        visible_BT, documents_BT, positions_BT: (B, T).
    """

    length: int
    visible_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    positions_BT: Tensor | None = None

    def to(self, device: torch.device) -> WholeRows:
        """Returns the same rows with the tensors on a device."""
        moved = (
            None if tensor is None else tensor.to(device, non_blocking=True)
            for tensor in (self.visible_BT, self.documents_BT, self.positions_BT)
        )
        return WholeRows(self.length, *moved)


class Ulysses:
    """Exchanges heads for positions in the ranks of a group, around the attention functions of transformers.

    Args:
        group: the process group whose ranks have the parts of the same rows, in the order of the positions.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.row_multiple = self._size
        """The number that the positions of a row must be a multiple of."""
        self.num_calls = 0
        """The number of attention calls that were exchanged."""

    def own_positions(self, length: int) -> Tensor:
        """Returns the positions that this rank has.

        Args:
            length: the number of positions of a row.

        Shapes:
            (S,).
        """
        return torch.arange(length).chunk(self._size)[self._rank]

    def attended(self, rows: WholeRows, targets_BT: Tensor | None) -> WholeRows:
        """Returns what attention must know of rows: all that is known, for every mask.

        Args:
            rows: the whole rows, on the host.
            targets_BT: the target of each position; None if the batch has no labels.

        Shapes:
            targets_BT: (B, T).
        """
        return rows

    @contextlib.contextmanager
    def exchanged_attention(self, rows: WholeRows) -> Iterator[None]:
        """Replaces the attention and mask functions of transformers by those that see whole rows.

        Args:
            rows: the whole rows whose parts the model is called with.
        """
        attention, masks = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
        before = dict(attention._local_mapping), dict(masks._local_mapping)
        attention_before = {name: attention[name] for name in attention if name not in UNCHANGED}
        masks_before = {name: masks[name] for name in masks}
        try:
            for name, function in attention_before.items():
                attention[name] = functools.partial(self._attend, function, rows)
            # Each model has its own function for "eager", which transformers finds in the module of the model.
            attention["eager"] = functools.partial(self._attend, None, rows)
            for name, function in masks_before.items():
                masks[name] = functools.partial(_mask_of_whole_rows, function, rows)
            yield
        finally:
            attention._local_mapping, masks._local_mapping = before

    def _attend(
        self,
        function: Callable[..., Any] | None,
        rows: WholeRows,
        module: nn.Module,
        query_BHSD: Tensor,
        key_BHSD: Tensor,
        value_BHSD: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Returns the attention of this rank's positions to the whole rows, in the form of an attention function.

        Shapes:
            query_BHSD: (B, H, S, D). key_BHSD, value_BHSD: (B, G, S, D) with G heads of keys and values. Returns
            (B, S, H, D).
        """
        self.num_calls += 1
        attend = _eager_function_of(module) if function is None else function
        heads, groups = query_BHSD.shape[1], key_BHSD.shape[1]
        parts_BHSD = [query_BHSD, *self._spread(key_BHSD, value_BHSD)]
        query_BHTD, key_BHTD, value_BHTD = self._to_heads(parts_BHSD)
        per_key = query_BHTD.shape[1] // key_BHTD.shape[1]
        if per_key != heads // groups:
            module = _WithHeads(module, per_key)  # type: ignore[assignment]
        if "position_ids" in kwargs:
            # Flash attention reads document boundaries from positions, which must be those of the whole rows.
            kwargs["position_ids"] = rows.positions_BT
        output_BTHD, _ = attend(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, *args, **kwargs)
        return self._to_positions(output_BTHD), None

    def _spread(self, key_BHSD: Tensor, value_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values with at least one head for each rank; autograd adds the gradients of copies."""
        heads = key_BHSD.shape[1]
        if heads % self._size == 0:
            return key_BHSD, value_BHSD
        copies = self._size // heads
        return key_BHSD.repeat_interleave(copies, dim=1), value_BHSD.repeat_interleave(copies, dim=1)

    def _to_heads(self, parts_BHSD: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns this rank's heads of each tensor at all positions, by one all-to-all.

        Shapes:
            parts_BHSD: (B, H, S, D) with several numbers H. Returns (B, H / size, T, D) for each.
        """
        counts = [part.shape[1] // self._size for part in parts_BHSD]
        # For each rank, its heads of all tensors lie next to one another.
        of_rank = [part.chunk(self._size, dim=1) for part in parts_BHSD]
        sent_RBHSD = torch.stack([torch.cat(parts, dim=1) for parts in zip(*of_rank, strict=True)])
        # The first dimension of what comes back is the rank that sent it: its positions.
        whole_BHTD = self._exchange(sent_RBHSD).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return torch.split(whole_BHTD, counts, dim=1)

    def _to_positions(self, output_BTHD: Tensor) -> Tensor:
        """Returns all heads at this rank's positions, from this rank's heads at all positions.

        Shapes:
            output_BTHD: (B, T, H / size, D). Returns (B, S, H, D).
        """
        sent_RBSHD = torch.stack(output_BTHD.chunk(self._size, dim=1))
        return self._exchange(sent_RBSHD).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()

    def _exchange(self, sent: Tensor) -> Tensor:
        received: Tensor = all_to_all_single_autograd(sent.flatten(0, 1), None, None, self._group)
        return received.view(sent.shape)


def _mask_of_whole_rows(
    function: Callable[..., Any], rows: WholeRows, *args: Any, mask_function: Any = None, **kwargs: Any
) -> Any:
    """Returns the mask of whole rows from a mask function of transformers, which is called for one rank's positions.

    Args:
        function: the mask function of the attention in use.
        rows: the whole rows.
        *args: positional arguments of the mask function, which transformers does not give.
        mask_function: which positions see which others, such as a causal or a sliding window.
        **kwargs: the other arguments of the mask function.
    """
    if args or mask_function is None or kwargs.get("q_offset") or kwargs.get("kv_offset") or kwargs.get("use_vmap"):
        raise TrainingError(
            "the model makes an attention mask of its own, which is not known for whole rows",
            code="FG709",
            hint="remove context_parallel_size",
        )
    given = {**kwargs, "q_length": rows.length, "kv_length": rows.length, "attention_mask": rows.visible_BT}
    if rows.documents_BT is not None and rows.positions_BT is not None:
        # As transformers does for packed rows that it finds by their positions.
        mask_function = packed_sequence_compatibility_function(mask_function, rows.positions_BT, rows.documents_BT)
        given["allow_is_causal_skip"] = False
    return function(mask_function=mask_function, **given)


def _eager_function_of(module: nn.Module) -> Callable[..., Any]:
    """Returns the function of the model's own module that transformers uses for eager attention."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise TrainingError(
        f"{type(module).__name__} has no function for eager attention",
        code="FG709",
        hint="set attn_implementation: sdpa",
    )


class _WithHeads:
    """An attention module that says how many of its query heads use one head of keys and values on this rank."""

    def __init__(self, module: nn.Module, num_key_value_groups: int) -> None:
        self._module = module
        self.num_key_value_groups = num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
