"""Ring attention around transformers' attention functions, while each rank computes its part of the positions.

`Ring` does what `Ulysses` does, by torch's ring attention: queries stay on their rank, and keys and values go around.
Heads are not divided, so their number does not limit that of the ranks. In return, only causal attention over whole
rows is known: what the model asks for beyond it is refused, never left out.

Shapes:
    B rows, T positions of a whole row, S = T / size positions of one rank, H heads, D channels of a head.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forgather.errors import DistributedError, TrainingError
from forgather.ml.context_attention import UNCHANGED, WholeRows
from forgather.ml.losses import IGNORE_INDEX
from forgather.ml.ring_attention import (
    AttentionKind,
    kind_of,
    own_positions,
    piece_multiple,
    ring_attention,
    ring_error,
)
from forgather.ring_models import ATTENTION, INSTEAD

_UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias", "cache", "block_mask", "score_mod")
"""Arguments of attention functions that change its result."""
_LARGEST = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest relative error of a kernel. Rounding gives a tenth of it, another mask or scale more than 1e-1."""


class Ring:
    """Sends keys and values around the ranks of a group, in place of the attention function of transformers.

    Args:
        group: the process group whose ranks have the parts of the same rows.
        device: the device that the model computes on.
        rotate_method: "allgather" or "alltoall", as for `ring_attention`.
    """

    def __init__(self, group: Any, device: torch.device, *, rotate_method: str = "allgather") -> None:
        self._group = group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._rotate_method = rotate_method
        self._kinds: dict[AttentionKind, bool] = {}
        self.row_multiple = 2 * self._size * piece_multiple(device.type)
        """The number that the positions of a row must be a multiple of."""
        self.num_calls = 0
        """The number of attention calls that were computed by the ring."""

    def own_positions(self, length: int) -> Tensor:
        """Returns the positions that this rank has.

        Args:
            length: the number of positions of a row.

        Shapes:
            (S,).
        """
        return own_positions(length, self._rank, self._size)

    def attended(self, rows: WholeRows, targets_BT: Tensor | None) -> WholeRows:
        """Returns what attention must know of rows: nothing but their length.

        Padding after the tokens needs no mask: no token sees what comes later, and what padding computes is not used.

        Args:
            rows: the whole rows, on the host.
            targets_BT: the target of each position; None if the batch has no labels.

        Raises:
            TrainingError: FG794 if the attention of the rows is not causal over whole rows.

        Shapes:
            targets_BT: (B, T).
        """
        if rows.documents_BT is not None:
            raise _rows_of_another_mask("the batch has rows of several documents, which must not see one another")
        if (visible_BT := rows.visible_BT) is not None:
            if bool((visible_BT[:, 1:] & ~visible_BT[:, :-1]).any()):
                raise _rows_of_another_mask(
                    "the attention_mask of the batch hides tokens before others", "padding_side"
                )
            if targets_BT is not None and bool((~visible_BT & (targets_BT != IGNORE_INDEX)).any()):
                raise _rows_of_another_mask("the batch has labels where its attention_mask hides the token", "labels")
        return WholeRows(rows.length)

    @contextlib.contextmanager
    def exchanged_attention(self, rows: WholeRows) -> Iterator[None]:
        """Replaces the attention function of transformers by the ring, and its masks by none.

        Args:
            rows: the whole rows whose parts the model is called with, as `attended` returned them.

        Raises:
            DistributedError: FG795 on every rank, if the kernel of an attention that was computed for the first time
                gives something else than attention over whole rows.
        """
        attention, masks = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
        before = dict(attention._local_mapping), dict(masks._local_mapping)
        names = [name for name in attention if name not in UNCHANGED], list(masks)
        try:
            for name in [*names[0], "eager"]:
                attention[name] = functools.partial(_refuse_implementation, name)
            for name in names[1]:
                masks[name] = _no_mask
            attention[ATTENTION] = self._attend
            yield
        finally:
            attention._local_mapping, masks._local_mapping = before
        # After the backward pass, whose recomputation would take the comparison for a part of the forward pass.
        self._compare()

    def _attend(
        self,
        module: nn.Module,
        query_BHSD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Returns the attention of this rank's positions to the whole rows, in the form of an attention function.

        Shapes:
            query_BHSD: (B, H, S, D). key_BGSD, value_BGSD: (B, G, S, D) with G heads of keys and values. Returns
            (B, S, H, D).
        """
        if attention_mask is not None:
            raise refusal("the model gives its attention a mask of its own")
        if dropout:
            raise refusal(f"attention has a dropout of {dropout}", f"set attention_dropout: 0.0, or {INSTEAD}")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise refusal("attention is not causal")
        if asked := [name for name in _UNKNOWN if kwargs.get(name) is not None]:
            raise refusal(f"the model gives its attention {asked[0]!r}")
        self.num_calls += 1
        query_BHSD, key_BGSD, value_BGSD = _autocast(query_BHSD, key_BGSD, value_BGSD)
        # A plan computes nothing that could be compared.
        if not isinstance(query_BHSD, FakeTensor):
            self._kinds.setdefault(kind_of(query_BHSD, key_BGSD, scaling), False)
        settings = {"group": self._group, "rotate_method": self._rotate_method, "scale": scaling}
        output_BHSD = ring_attention(query_BHSD, key_BGSD, value_BGSD, **settings)
        return output_BHSD.transpose(1, 2).contiguous(), None

    def _compare(self) -> None:
        """Compares the ring with attention over whole rows, for each kind of attention that is new.

        Raises:
            DistributedError: FG795 on every rank, if a kernel computes something else.
        """
        for kind in [kind for kind, is_compared in self._kinds.items() if not is_compared]:
            # Products of float32 may be allowed the precision of ten bits.
            is_exact = torch.get_float32_matmul_precision() == "highest" or kind.dtype == torch.float64
            largest = max(_LARGEST[kind.dtype], 0.0 if is_exact else _LARGEST[torch.float16])
            with torch.no_grad():
                error = float(ring_error(kind, group=self._group, rotate_method=self._rotate_method))
            if not error <= largest:
                raise DistributedError(
                    f"torch's ring attention for {kind.dtype} on {kind.device.type}, with {kind.heads} heads of "
                    f"{kind.channels} channels, differs from attention over whole rows by {error:.1g}, and rounding "
                    f"explains {largest:.0g}",
                    code="FG795",
                    hint=INSTEAD,
                ).about("context_parallel_method")
            self._kinds[kind] = True


def refusal(reason: str, instead: str = INSTEAD) -> DistributedError:
    """Returns the error about a model that ring attention does not compute.

    Args:
        reason: what the model has.
        instead: what to write.
    """
    return DistributedError(
        f"context_parallel_method is 'ring', and {reason}: torch's ring attention is causal attention over whole rows",
        code="FG759",
        hint=instead,
    ).about("context_parallel_method")


def _rows_of_another_mask(reason: str, about: str = "") -> TrainingError:
    others = {
        "padding_side": "pad rows after their tokens (padding_side: right), or ",
        "labels": "label padding -100, or ",
    }
    return TrainingError(
        f"{reason}, and context_parallel_method: ring computes causal attention over whole rows",
        code="FG794",
        hint=f"{others.get(about, '')}{INSTEAD}",
    ).about("context_parallel_method")


def _refuse_implementation(name: str, *args: Any, **kwargs: Any) -> Any:
    raise refusal(f"the attention of the model is {name!r}", f"set attn_implementation: {ATTENTION}, or {INSTEAD}")


def _no_mask(*args: Any, mask_function: Any = None, **kwargs: Any) -> None:
    """Returns the mask of causal attention over whole rows, which is none; a mask function in transformers' form."""
    if args or mask_function is not causal_mask_function or kwargs.get("q_offset") or kwargs.get("kv_offset"):
        raise refusal("the model has a mask that is not causal, such as that of a sliding window")


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Returns queries, keys and values in the dtype that autocast gives those of torch's attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]
